"""The definition of attention over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import (
    QUANTISED,
    AppendOptions,
    AttentionOptions,
    DecodeOptions,
    largest_scale,
    same_memory,
)
from fastattn.backends.reference._masked import compute_dtype
from fastattn.backends.reference.sdpa import attend
from fastattn.compat import runs_eagerly


def decode_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key_cache: Tensor,  # [E, Hkv, N, D], E entries of N keys, or pages of N keys
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    cache_seqlens: Tensor,  # [B] int64
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    sinks: Tensor | None = None,  # [1, Hq]
    relative_bias: Tensor | None = None,  # [1, Hq, 2 M + 1]
    mask_program: Tensor | None = None,  # [size] int32, for a cache of P * N keys
    cache_leftpad: Tensor | None = None,  # [B] int64
    key_scales: Tensor | None = None,  # [E, Hkv, N] float32, of quantised caches
    value_scales: Tensor | None = None,  # [E, Hkv, N] float32
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])``: attention over the first keys of a cache.

    Sequence b uses the first cache_seqlens[b] keys of its entry, or of the pages in its row of the
    block table, without the first cache_leftpad[b]. Its last query is at the position of the last
    of these keys. A row of a quantised cache is multiplied by its scale.
    """
    _check_cache_rows(key_cache, cache_seqlens, block_table, cache_batch_idx)
    key, value = (_rows_of_sequences(x, query, block_table, cache_batch_idx) for x in (
        key_cache, value_cache))  # fmt: skip
    if key_scales is not None and value_scales is not None:
        compute = compute_dtype(query.dtype)
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        lookup = (query, block_table, cache_batch_idx)
        row_scales = {name: _rows_of_sequences(x[..., None], *lookup) for name, x in scales.items()}
        check_scales(row_scales, key_cache.dtype, cache_seqlens, cache_leftpad)
        key = key.to(compute) * row_scales["key_scales"].to(compute)
        value = value.to(compute) * row_scales["value_scales"].to(compute)
    position = torch.arange(key.shape[2], device=query.device)
    lengths = cache_seqlens[:, None, None, None]
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    # Keys beyond a sequence have no distance and read entry 0, which every table has.
    distance = torch.where(position < lengths, rows + lengths - query.shape[2] - position, 0)
    filled = position < lengths
    if cache_leftpad is not None:
        filled = filled & (position >= cache_leftpad[:, None, None, None])
    out, lse, _ = attend(
        query,
        key,
        value,
        filled,
        alibi_slopes,
        None,  # no seed of dropout
        AttentionOptions(**vars(options)),
        distance=distance,  # [B, 1, Lq, N]
        sinks=sinks,
        relative_bias=relative_bias,
        mask_program=mask_program,
    )
    return out.to(query.dtype), lse.double()


def append_to_cache(
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    cache_seqlens: Tensor,  # [B] int64, before the new rows are added
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    rotary_cos: Tensor | None = None,  # [M, R / 2]
    rotary_sin: Tensor | None = None,  # [M, R / 2]
    rotary_positions: Tensor | None = None,  # [B, L] int64; None: the index of the row
    query: Tensor | None = None,  # [B, Hq, Lq, D], of the last Lq new tokens
    key_scales: Tensor | None = None,  # [E, Hkv, N] float32, of quantised caches
    value_scales: Tensor | None = None,  # [E, Hkv, N] float32
    cache_leftpad: Tensor | None = None,  # [B] int64
    *,
    options: AppendOptions,
) -> Tensor | None:
    """Append the new keys and values to each sequence, in place.

    With tables of angles, the keys are rotated first; return the rotated queries. Quantised caches
    store quantised rows and their scales.
    """
    _check_cache_rows(key_cache, cache_seqlens, block_table, cache_batch_idx, key.shape[2])
    if key_scales is not None and value_scales is not None:
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        lookup = (key, block_table, cache_batch_idx)
        row_scales = {name: _rows_of_sequences(x[..., None], *lookup) for name, x in scales.items()}
        check_scales(row_scales, key_cache.dtype, cache_seqlens, cache_leftpad)
        compute = compute_dtype(key.dtype)
        key, value = key.to(compute), value.to(compute)  # rounded once, when they are quantised
    at = cache_seqlens[:, None] + torch.arange(key.shape[2], device=key.device)  # [B, L]
    rotated = None
    if rotary_cos is not None and rotary_sin is not None and query is not None:
        positions = at if rotary_positions is None else rotary_positions
        cos, sin = rotary_cos[positions], rotary_sin[positions]  # [B, L, R / 2]
        interleaved, first = options.rotary_interleaved, key.shape[2] - query.shape[2]
        key = rotate(key, cos, sin, interleaved)
        rotated = rotate(query, cos[:, first:], sin[:, first:], interleaved)
    written = [(key_cache, key), (value_cache, value)]
    if key_scales is not None and value_scales is not None:  # all checks come before all writes
        (keys, scales_of_keys), (values, scales_of_values) = (
            quantise(x, key_cache.dtype) for x in (key, value)
        )
        _check_finite(key_cache.dtype, key, value, scales_of_keys, scales_of_values)
        written = [(key_cache, keys), (key_scales, scales_of_keys)]
        if not same_memory(key_scales, value_scales):  # else values are columns of the keys
            written += [(value_cache, values), (value_scales, scales_of_values)]
    if block_table is not None:
        page = key_cache.shape[2]
        entry = block_table.long().gather(1, at // page)
        at = at % page
    elif cache_batch_idx is not None:
        entry = cache_batch_idx[:, None]
    else:
        entry = torch.arange(key.shape[0], device=key.device)[:, None]
    for cache, x in written:
        cache[entry, :, at] = x.transpose(1, 2)
    return rotated


def quantise(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return rows [..., D] as int8 or fp8 [..., D], and their scales [...] in float32.

    The largest magnitude of each row becomes the largest number of the dtype.
    """
    min_scale, largest = torch.finfo(torch.float32).tiny, QUANTISED[dtype]
    if x.shape[-1] == 0:
        return x.to(dtype), x.new_full(x.shape[:-1], min_scale, dtype=torch.float32)
    scale = (x.abs().amax(-1) / largest).to(torch.float32).clamp(min=min_scale)
    numbers = x / scale[..., None].to(x.dtype)
    if dtype == torch.int8:
        numbers = numbers.round()
    return numbers.clamp(-largest, largest).to(dtype), scale


def check_scales(
    scales: Mapping[str, Tensor],  # [B, Hkv, keys, 1]
    dtype: torch.dtype,  # of the caches
    lengths: Tensor,  # [B]
    starts: Tensor | None,  # [B]
) -> None:
    """Raise an error for a scale that is not positive and finite, on the CPU in eager execution."""
    max_scale = largest_scale(dtype)
    allowed = "finite" if dtype == torch.int8 else f"at most {_two_digits(max_scale)} for e4m3"
    for name, x in scales.items():
        if not (x.is_cpu and runs_eagerly(x)):
            return
        row = torch.arange(x.shape[2], device=x.device)
        inside = row < lengths[:, None]
        if starts is not None:
            inside &= row >= starts[:, None]
        valid = (x[..., 0] > 0) & (x[..., 0] <= max_scale)
        invalid = (~valid & inside[:, None]).nonzero()
        if invalid.numel():
            b, h, j = invalid[0].tolist()
            raise ValueError(
                f"{name} must be positive and {allowed}, got {float(x[b, h, j])} for row {j} of "
                f"sequence {b}"
            )


def _two_digits(x: float) -> str:
    """x with two digits, such as 7.6e35."""
    return f"{x:.2g}".replace("e+", "e")


def _check_finite(
    dtype: torch.dtype, key: Tensor, value: Tensor, scales_of_keys: Tensor, scales_of_values: Tensor
) -> None:
    """Raise ValueError if an element or a scale is too large; on the CPU in eager execution."""
    limit = largest_scale(dtype)
    for name, x, scale in (("key", key, scales_of_keys), ("value", value, scales_of_values)):
        fits = torch.isfinite(x).all() & (scale <= limit).all()
        if x.is_cpu and runs_eagerly(x) and not bool(fits):
            raise ValueError(
                f"{name} must be finite to be quantised, and its elements at most "
                f"{_two_digits(limit * QUANTISED[dtype])}, got inf, NaN or more"
            )


def _check_cache_rows(
    cache: Tensor,  # [E, Hkv, N, D]
    lengths: Tensor,  # [B], before the new rows
    table: Tensor | None,  # [B, P]
    entries: Tensor | None,  # [B]
    new: int = 0,  # rows to append
) -> None:
    """Raise an error for a page or entry outside the cache, or a row that would be written twice.

    Checked only on the CPU in eager execution.
    """
    if not (lengths.is_cpu and runs_eagerly(lengths, table, entries)):
        return
    count, page, device = cache.shape[0], cache.shape[2], lengths.device
    if table is None:
        chosen = torch.arange(lengths.shape[0], device=device) if entries is None else entries
        invalid = chosen[(chosen < 0) | (chosen >= count)]
        if invalid.numel():
            raise ValueError(
                f"cache_batch_idx must name one of the {count} entries of the cache, got "
                f"{int(invalid[0])}"
            )
        return
    used = torch.arange(table.shape[1], device=device) * page < (lengths + new)[:, None]
    invalid = table[used & ((table < 0) | (table >= count))]
    if invalid.numel():
        raise ValueError(f"block_table must name one of the {count} pages, got {int(invalid[0])}")
    at = lengths[:, None] + torch.arange(new, device=device)
    rows = table.long().gather(1, at // max(page, 1)) * page + at % max(page, 1)
    written, counts = rows.unique(return_counts=True)
    repeated = written[counts > 1]
    if repeated.numel():
        raise ValueError(
            f"block_table must not append twice to one row, got page {int(repeated[0]) // page} "
            "twice"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R columns of x [B, H, L, D] by angles with cos and sin [B, L, R / 2].

    Two columns (a, b), paired as ``interleaved`` says, become (a cos - b sin, a sin + b cos).
    """
    compute = compute_dtype(x.dtype)
    cos, sin = cos.to(compute)[:, None], sin.to(compute)[:, None]
    pair_count = cos.shape[-1]
    rotating, unrotated = x[..., : 2 * pair_count].to(compute), x[..., 2 * pair_count :]
    columns = rotating.unflatten(-1, (pair_count, 2) if interleaved else (2, pair_count))
    a, b = columns.unbind(-1 if interleaved else -2)
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1 if interleaved else -2)
    return torch.cat([rotated.flatten(-2).to(x.dtype), unrotated], -1)


def _rows_of_sequences(
    cache: Tensor, query: Tensor, block_table: Tensor | None, entries: Tensor | None
) -> Tensor:
    """The keys of every sequence in order, [B, Hkv, N of an entry or P * N of all pages, D]."""
    if block_table is not None:
        # Page numbers beyond a sequence's length may be invalid; no query can see those keys.
        pages = block_table.long().clamp(0, max(cache.shape[0] - 1, 0))
        return index_cache(cache, pages).transpose(1, 2).flatten(2, 3)
    return cache[: query.shape[0]] if entries is None else index_cache(cache, entries)


def index_cache(cache: Tensor, *index: Any) -> Tensor:
    """``cache[index]``; by bytes for fp8, which PyTorch 2.6 to 2.8 cannot index on the CPU."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[index].view(cache.dtype)
    return cache[index]
