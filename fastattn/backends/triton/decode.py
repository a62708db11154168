"""Decoding on Triton: the launches of the primitive, and of the append before it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import AppendOptions, DecodeOptions
from fastattn.backends.triton._attend import Biases, kernel_options, positive_scale, widths_of
from fastattn.backends.triton._core import Operand
from fastattn.backends.triton._decode_kernels import (
    Cache,
    append_rows,
    decode_chunks,
    decode_combine,
)
from fastattn.backends.triton._launch import block_of, launch, operand, plan
from fastattn.backends.triton._table import Launch

# A chunk is enough work for a program, and small enough that the chunks of one long sequence occupy
# a whole GPU. At most _WAYS programs share the chunks of a head: more are not needed to occupy the
# GPU, and most of them would do nothing for sequences that are shorter than the cache.
_CHUNK = 256
_WAYS = 64
_COMBINE = Launch(1, 16, 4, 1)  # chunks at a time; memory bound
_APPEND = Launch(16, 64, 4, 1)  # rows, columns


def decode_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    cache_seqlens: Tensor,  # [B] int64
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    sinks: Tensor | None = None,  # [1, Hq]
    relative_bias: Tensor | None = None,  # [1, Hq, 2 M + 1]
    mask_program: Tensor | None = None,  # [size] int32
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    batch, heads, q_len, _ = query.shape
    kv_heads = key_cache.shape[1]
    out = empty_output(query, value_cache.shape[3])
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float64)
    query, scale, _ = positive_scale(query, options)
    cache = _cache_location(key_cache, cache_seqlens, block_table, cache_batch_idx)
    sizes = (heads, kv_heads, q_len, cache.capacity)
    biases = Biases(None, alibi_slopes, None, sinks, relative_bias, mask_program=mask_program)
    opt = kernel_options(sizes, biases, options, scale, offset=None)
    widths = widths_of(query, value_cache)
    rows = opt.group * q_len
    kernel = "decode" if rows <= 16 else "decode_rows"
    launch_plan = plan(kernel, query, widths["BD"], widths["BDV"])
    if opt.table is not None or opt.p_program is not None:  # these need registers beside the tile
        launch_plan = launch_plan.halved().halved()._replace(warps=8)
    chunks = -(-cache.capacity // _CHUNK)
    chunk_states = {
        "p_max": lse.new_empty((*lse.shape, chunks), dtype=torch.float32),
        "p_sum": lse.new_empty((*lse.shape, chunks), dtype=torch.float32),
        "p_acc": lse.new_empty((*lse.shape, chunks, value_cache.shape[3]), dtype=torch.float32),
    }
    ways = min(_WAYS, block_of(chunks))
    launch(
        decode_chunks,
        launch_plan,
        ways * launch_plan.q_tiles(rows) * batch * kv_heads,
        query.device,
        q=operand(query),
        k=_cache_operand(key_cache),
        v=_cache_operand(value_cache),
        cache=cache,
        opt=opt,
        **chunk_states,
        chunks=chunks,
        WAYS=ways,
        CHUNK=_CHUNK,
        **widths,
    )
    launch(
        decode_combine,
        _COMBINE,
        batch * heads * q_len,
        query.device,
        cache=cache,
        opt=opt,
        **chunk_states,
        chunks=chunks,
        out=operand(out),
        p_lse=lse,
        CHUNK=_CHUNK,
        DV=widths["DV"],
        BDV=widths["BDV"],
    )
    return out, lse


def append_to_cache(
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    cache_seqlens: Tensor,  # [B] int64, without the new rows
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    *,
    options: AppendOptions,
) -> None:
    """Append new keys and values to the cache of each sequence, in place."""
    cache = _cache_location(key_cache, cache_seqlens, block_table, cache_batch_idx)
    for x, cached in ((key, key_cache), (value, value_cache)):
        batch, heads, rows, width = x.shape
        launch(
            append_rows,
            _APPEND,
            _APPEND.tiles(rows, width) * batch * heads,
            x.device,
            x=operand(x),
            cached=_cache_operand(cached),
            cache=cache,
            heads=heads,
            rows=rows,
            width=width,
        )


def _cache_location(
    key_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> Cache:
    """The location of each sequence's keys, in the form of the kernels."""
    entries, _, length, _ = key_cache.shape
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    return Cache(
        p_lengths=lengths.contiguous(),
        p_entries=None if cache_batch_idx is None else cache_batch_idx.contiguous(),
        p_table=block_table,
        table_row=None if block_table is None else block_table.stride(0),
        length=length,
        entries=entries,
        capacity=length * (1 if block_table is None else block_table.shape[1]),
    )


def _cache_operand(x: Tensor) -> Operand:
    """A cache [E, Hkv, N, D] as an operand that does not broadcast dimensions of size 1."""
    return Operand(x, *x.stride())
