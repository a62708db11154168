"""Decoding on a cache of keys and values on the CUDA kernels.

Lengths, pages and entries stay on the GPU, so the host never waits for them. Invalid ones raise
no error, but the kernels never access memory outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import address, operand, table_for
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import (
    DTYPES,
    MAX_LENGTH,
    mask_workspace,
    on,
    optional_operands,
    why_not_dtype,
)
from fastattn.backends.primitives import AppendOptions, DecodeOptions

__all__ = ["append_to_cache", "decode_attention", "why_not", "why_not_append"]

# A sequence is split between blocks of threads at multiples of _SPLIT_KEYS; chosen without a
# measurement. With more than _MOST_ROWS query rows per key head there is enough work without a
# split.
_SPLIT_KEYS, _MOST_ROWS = 256, 64


def why_not(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    reasons = sdpa.why_not(
        query, key_cache, value_cache, alibi_slopes=alibi_slopes, relative_bias=relative_bias
    )
    return reasons + _why_not_capacity(key_cache, block_table)


def why_not_append(key_cache: Tensor, block_table: Tensor | None = None, **_: Any) -> list[str]:
    """Return the reasons why the kernel cannot append."""
    return why_not_dtype(key_cache.dtype) + _why_not_capacity(key_cache, block_table)


def _why_not_capacity(cache: Tensor, block_table: Tensor | None) -> list[str]:
    if _capacity(cache, block_table) > MAX_LENGTH or cache.shape[0] > MAX_LENGTH:
        return [f"the cache has more than {MAX_LENGTH} keys of a sequence, or entries"]
    return []


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
    mask_program: Tensor | None = None,  # [size] int32, of a cache of the capacity
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    batch, heads, queries, _ = query.shape
    kv_heads, value_width = value_cache.shape[1], value_cache.shape[3]
    out = empty_output(query, value_width)
    lse = query.new_empty((batch, heads, queries), dtype=torch.float64)
    capacity = _capacity(key_cache, block_table)
    divided = queries * heads <= _MOST_ROWS * kv_heads
    split_keys = _SPLIT_KEYS if divided else max(capacity, 1)
    splits = -(-capacity // split_keys)
    shape = (batch, heads, queries, splits)
    sums = query.new_empty((*shape, value_width), dtype=torch.float32)
    stats = query.new_empty((*shape, 2), dtype=torch.float32)
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
    workspace = mask_workspace(mask_program, (batch, heads, queries, capacity))
    biases = (alibi_slopes, sinks, relative_bias, None, mask_program, workspace)
    kept, cache = _cache(key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx)
    with on(query) as stream:
        _cuda.decode_attention(
            DTYPES[query.dtype],
            stream,
            (batch, heads, kv_heads, queries, capacity, query.shape[3], value_width),
            options,
            {"query": operand(query), **optional_operands((batch, heads), None, *biases)},
            cache,
            {
                "out": operand(out),
                "lse": lse.data_ptr(),
                "part_sums": sums.data_ptr(),
                "part_stats": stats.data_ptr(),
                "split_keys": split_keys,
                "splits": splits,
            },
        )
    del kept
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
    """Append the new keys and values to those of each sequence, in place."""
    batch, kv_heads, rows, width = key.shape
    capacity = _capacity(key_cache, block_table)
    kept, cache = _cache(key_cache, value_cache, cache_seqlens, block_table, cache_batch_idx)
    with on(key) as stream:
        _cuda.append_to_cache(
            DTYPES[key.dtype],
            stream,
            (batch, kv_heads, kv_heads, rows, capacity, width, value.shape[3]),
            {"key": operand(key), "value": operand(value)},
            cache,
        )
    del kept


def _capacity(cache: Tensor, block_table: Tensor | None) -> int:
    """The keys that an entry, or a row of the block table, has room for."""
    return cache.shape[2] * (1 if block_table is None else block_table.shape[1])


def _cache(
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The tensors that must live until the launch, and the cache's operands by name."""
    lengths = cache_seqlens.contiguous()
    entries = None if cache_batch_idx is None else cache_batch_idx.contiguous()
    table = block_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    return (lengths, entries, table), {
        "key_cache": operand(key_cache),
        "value_cache": operand(value_cache),
        "lengths": lengths.data_ptr(),
        "entries": address(entries),
        "block_table": address(table),
        "block_table_stride": 0 if table is None else table.stride(0),
        "page_size": key_cache.shape[2],
        "cache_entries": key_cache.shape[0],
    }
