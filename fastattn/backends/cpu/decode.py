"""The adapter of decoding on a cache of keys and values."""

from __future__ import annotations

from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import AppendOptions, DecodeOptions


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
    out, lse = _cpu.decode_attention(
        options,
        query,
        key_cache,
        value_cache,
        cache_seqlens,
        block_table,
        cache_batch_idx,
        alibi_slopes,
        sinks,
        relative_bias,
        mask_program,
        cache_leftpad,
        key_scales,
        value_scales,
    )
    return out if out.dtype is query.dtype else out.to(query.dtype), lse


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
    """Append new keys and values to the cache of each sequence, in place; rotate the queries."""
    return _cpu.append_to_cache(
        options,
        key_cache,
        value_cache,
        key,
        value,
        cache_seqlens,
        block_table,
        cache_batch_idx,
        rotary_cos,
        rotary_sin,
        rotary_positions,
        query,
        key_scales,
        value_scales,
        cache_leftpad,
    )
