"""The adapter of decoding on a cache of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import address, operand, with_columns_together
from fastattn.backends.cpu.operands import DTYPES, optional_operands
from fastattn.backends.primitives import QUANTISED, AppendOptions, DecodeOptions, same_memory

Sizes = tuple[int, ...]  # or strides, of four dimensions

# Of the kernel on vectors: the query rows per key head up to which reading pages is faster than
# gathering them, and the most elements of a row.
_MOST_ROWS = 32
# Of quantised caches, before widening the rows and the kernel for many queries are faster.
_MOST_QUANTISED_ROWS = 64
_MOST_INTEGER_ROWS = 512  # of int8, multiplied as integers
_MOST_QUANTISED_QUERIES = 32
WIDEST = 576


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
    mask_program: Tensor | None = None,  # [size] int32, for a cache
    cache_leftpad: Tensor | None = None,  # [B] int64
    key_scales: Tensor | None = None,  # [E, Hkv, N] float32, of quantised caches
    value_scales: Tensor | None = None,  # [E, Hkv, N] float32
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    dtype, capacity = query.dtype, _capacity(key_cache.shape[2], block_table)
    scales: dict[str, Any] = {}
    if key_scales is not None and value_scales is not None:
        wide = torch.promote_types(dtype, torch.float32)
        most_rows = _MOST_INTEGER_ROWS if _integers(query, key_cache) else _MOST_QUANTISED_ROWS
        few = query.shape[2] <= _MOST_QUANTISED_QUERIES
        if few and _reads_in_place(query, key_cache, value_cache, most_rows):
            query = query.to(wide)
            named_scales = (("key_scales", key_scales), ("value_scales", value_scales))
            scales = {name: operand(x[..., None]) for name, x in named_scales}
            scales["float8"] = key_cache.dtype == torch.float8_e4m3fn
            scales["sixteen_bits"] = dtype.itemsize == 2
        else:
            # bfloat16 has the range of the scales; its kernels are faster than those of float32.
            query = query if dtype == torch.bfloat16 else query.to(wide)
            where = (cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
            caches = key_cache, value_cache, key_scales, value_scales
            key_cache, value_cache = _gathered(query.dtype, *caches, *where)
            block_table = cache_batch_idx = None
    batch, heads, queries, width = query.shape
    entries, kv_heads, keys, value_width = value_cache.shape
    out = empty_output(query, value_width)
    lse = torch.empty((batch, heads, queries), dtype=torch.float64, device="cpu")
    of_one_head = mask_program is not None or relative_bias is not None
    stacks = not (scales or of_one_head) and alibi_slopes is None and sinks is None
    stacks = stacks and _stacks(query, kv_heads)
    if block_table is not None and not (
        scales or _reads_pages(query, key_cache, value_cache, of_one_head, stacks)
    ):
        where = (cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
        key_cache, value_cache = _gathered(dtype, key_cache, value_cache, None, None, *where)
        entries, keys, block_table = batch, key_cache.shape[2], None
    table = None if block_table is None else _rows(block_table)
    lengths = cache_seqlens.contiguous()
    begins = None if cache_leftpad is None else cache_leftpad.contiguous()
    chosen = None if cache_batch_idx is None else cache_batch_idx.contiguous()
    if relative_bias is not None:
        relative_bias = with_columns_together(relative_bias)
    biases = (alibi_slopes, None, sinks, relative_bias, None, mask_program)
    sizes: Sizes = (batch, heads, kv_heads, queries)
    rows = sizes, query.stride(), out.stride()
    if stacks:
        rows = _stacked(rows)
        options, begins = _of_one_position(options, lengths, begins)
    sizes, q_stride, out_stride = rows
    _cpu.decode_attention(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        (*sizes, capacity, width, value_width),  # a mask is that of the whole cache
        query.data_ptr(),
        q_stride,
        key_cache.data_ptr(),
        key_cache.stride(),
        value_cache.data_ptr(),
        value_cache.stride(),
        out.data_ptr(),
        out_stride,
        lse.data_ptr(),
        options,
        optional_operands(batch, heads, None, *biases) | scales,
        _cache(lengths, chosen, table, keys, begins),
        entries,
    )
    return out.to(dtype), lse


def append_to_cache(
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    cache_seqlens: Tensor,  # [B] int64, without the new rows
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    rotary_cos: Tensor | None = None,  # [M, R / 2]
    rotary_sin: Tensor | None = None,  # [M, R / 2]
    rotary_positions: Tensor | None = None,  # [B, L] int64
    query: Tensor | None = None,  # [B, Hq, Lq, D]
    key_scales: Tensor | None = None,  # [E, Hkv, N] float32, of quantised caches
    value_scales: Tensor | None = None,  # [E, Hkv, N] float32
    cache_leftpad: Tensor | None = None,  # [B] int64
    *,
    options: AppendOptions,
) -> Tensor | None:
    """Append the new keys and values to those of each sequence, in place."""
    batch, kv_heads, rows, width = key.shape
    entries, _, keys, value_width = value_cache.shape
    table = None if block_table is None else _rows(block_table)
    lengths = cache_seqlens.contiguous()
    chosen = None if cache_batch_idx is None else cache_batch_idx.contiguous()
    heads, queries = 0, 0
    rotated: Tensor | None = None
    rotary: dict[str, Any] = {}
    if rotary_cos is not None and rotary_sin is not None and query is not None:
        heads, queries = query.shape[1:3]
        rotated = empty_output(query, width)
        positions = None if rotary_positions is None else rotary_positions.contiguous()
        rotary = {
            "rotary_pairs": rotary_cos.shape[1],
            "query": operand(query),
            "rotated": operand(rotated),
            "rotary_cos": operand(rotary_cos[None, None]),
            "rotary_sin": operand(rotary_sin[None, None]),
            "tables_are_f32": rotary_cos.dtype == torch.float32,
            "rotary_rows": rotary_cos.shape[0],
            "positions": address(positions),
        }
    scales: dict[str, Any] = {}
    if key_scales is not None and value_scales is not None:
        named_scales = (("key_scales", key_scales), ("value_scales", value_scales))
        scales = {name: operand(x[..., None]) for name, x in named_scales}
        scales["float8"] = key_cache.dtype == torch.float8_e4m3fn
        if same_memory(key_scales, value_scales):  # values are columns of the keys
            del scales["value_scales"]
    begins = None if cache_leftpad is None else cache_leftpad.contiguous()
    sizes = (batch, heads, kv_heads, queries, rows, _capacity(keys, table))
    _cpu.append_to_cache(
        DTYPES[key.dtype],
        torch.get_num_threads(),
        (*sizes, width, value_width, entries),
        options,
        {
            "key": operand(key),
            "value": operand(value),
            "key_cache": operand(key_cache),
            "value_cache": operand(value_cache),
            **scales,
        },
        rotary,
        _cache(lengths, chosen, table, keys, begins),
    )
    return rotated


def _capacity(keys: int, table: Tensor | None) -> int:
    """The keys that a sequence has room for, in an entry or in a row of pages of ``keys``."""
    return keys if table is None else table.shape[1] * keys


def _cache(
    lengths: Tensor,
    entries: Tensor | None,
    table: Tensor | None,
    keys: int,
    begins: Tensor | None = None,
) -> dict[str, int]:
    """The operands that locate the keys of each sequence; the tensors must outlive the call."""
    return {
        "lengths": lengths.data_ptr(),
        "begins": address(begins),
        "entries": address(entries),
        "block_table": address(table),
        "block_table_stride": 0 if table is None else table.stride(0),
        "page_size": 0 if table is None else keys,
    }


def _reads_pages(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, biased: bool, stacks: bool
) -> bool:
    """Whether the kernel reads pages in place: dense rows, few of them on vectors.

    Not if heads are stacked: pages are read by the kernel of few queries alone.
    """
    heads, queries, kv_heads = *query.shape[1:3], key_cache.shape[1]
    dense = key_cache.stride(3) == 1 == value_cache.stride(3)
    if dense and _cpu.decodes_on_tiles(DTYPES[query.dtype], heads, kv_heads, queries, biased):
        return True
    return not stacks and _reads_in_place(query, key_cache, value_cache, _MOST_ROWS)


def _integers(query: Tensor, key_cache: Tensor) -> bool:
    """Whether the kernel multiplies the rows of this cache as integers."""
    sixteen_bits = key_cache.dtype == torch.int8 and query.dtype.itemsize == 2
    return sixteen_bits and _cpu.multiplies_integers(query.shape[3])


def _reads_in_place(query: Tensor, key_cache: Tensor, value_cache: Tensor, most_rows: int) -> bool:
    """Whether the kernel on vectors is the fastest for these rows, however they are stored."""
    (_, heads, queries, width), (_, kv_heads, _, value_width) = query.shape, value_cache.shape
    if not key_cache.stride(3) == 1 == value_cache.stride(3):
        return False
    if key_cache.dtype in QUANTISED and query.dtype == torch.float64:
        return False
    rows = queries * heads // max(kv_heads, 1)
    return rows <= most_rows and max(width, value_width) <= WIDEST


def _stacks(query: Tensor, kv_heads: int) -> bool:
    """Whether the heads of a key head, one query each, are faster as the queries of one head.

    They then fill the lanes of a panel.
    """
    _, heads, queries, _ = query.shape
    if queries != 1 or _cpu.decodes_on_tiles(DTYPES[query.dtype], heads, kv_heads, queries, False):
        return False
    return heads > _cpu.most_streamed_rows(DTYPES[query.dtype]) * max(kv_heads, 1)


def _stacked(rows: tuple[Sizes, Sizes, Sizes]) -> tuple[Sizes, Sizes, Sizes]:
    """Sizes (B, Hq, Hkv, 1) and strides of query and output, with the heads as queries."""
    (batch, heads, kv_heads, _), *strides = rows
    group = heads // kv_heads
    of_query, of_out = ((b, h * group, h, d) for b, h, _, d in strides)
    return (batch, kv_heads, kv_heads, group), of_query, of_out


def _of_one_position(
    options: DecodeOptions, lengths: Tensor, begins: Tensor | None
) -> tuple[DecodeOptions, Tensor | None]:
    """The window of the last query of a sequence as the first key that it sees."""
    if options.window_left >= 0:
        first = (lengths - 1 - options.window_left).clamp(min=0)
        begins = first if begins is None else torch.maximum(first, begins)
    return replace(options, window_left=-1, window_right=-1), begins


def _gathered(
    dtype: torch.dtype,  # of the results; without scales, of the caches, too
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    key_scales: Tensor | None,  # [E, Hkv, N], of quantised caches
    value_scales: Tensor | None,
    lengths: Tensor,  # [B]
    block_table: Tensor | None,
    entries: Tensor | None,
    begins: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rows of each sequence in order, times their scales, [B, Hkv, longest, D] and Dv.

    Those outside the sequences are not written.
    """
    table = None if block_table is None else _rows(block_table)
    lengths = lengths.contiguous()
    begins = None if begins is None else begins.contiguous()
    entries = None if entries is None else entries.contiguous()
    batch, (count, heads, keys, width) = lengths.shape[0], key_cache.shape
    capacity, value_width = _capacity(keys, table), value_cache.shape[3]
    longest = min(max(0, int(lengths.max())) if batch else 0, capacity)
    found_keys = torch.empty((batch, heads, longest, width), dtype=dtype, device="cpu")
    found_values = torch.empty((batch, heads, longest, value_width), dtype=dtype, device="cpu")
    operands: dict[str, Any] = {
        "key_cache": operand(key_cache),
        "value_cache": operand(value_cache),
        "keys": found_keys.data_ptr(),
        "values": found_values.data_ptr(),
    }
    if key_scales is not None and value_scales is not None:
        operands["key_scales"] = operand(key_scales[..., None])
        operands["value_scales"] = operand(value_scales[..., None])
        operands["float8"] = key_cache.dtype == torch.float8_e4m3fn
    _cpu.gather_rows(
        DTYPES[dtype],
        torch.get_num_threads(),
        (batch, heads, capacity, width, value_width, count, longest),
        operands,
        _cache(lengths, entries, table, keys, begins),
    )
    return found_keys, found_values


def _rows(block_table: Tensor) -> Tensor:
    if block_table.shape[1] == 0:  # its address would be that of no table
        return block_table.new_zeros((block_table.shape[0], 1))
    return block_table if block_table.stride(1) == 1 else block_table.contiguous()
