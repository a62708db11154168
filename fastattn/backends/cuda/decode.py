"""Decoding on a cache of keys and values on the CUDA kernels.

Lengths, pages and entries stay on the GPU, so the host never waits for them. Invalid ones raise
no error, but the kernels never access memory outside the cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import MAX_LENGTH, launch, why_not_dtype
from fastattn.backends.primitives import AppendOptions, DecodeOptions

__all__ = ["append_to_cache", "decode_attention", "why_not", "why_not_append"]


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
    where = (cache_seqlens, block_table, cache_batch_idx)
    biases = (alibi_slopes, sinks, relative_bias, mask_program)
    results: Any = launch(
        _cuda.decode_attention, query, options, query, key_cache, value_cache, *where, *biases
    )
    return results


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
    where = (cache_seqlens, block_table, cache_batch_idx)
    launch(_cuda.append_to_cache, key, key_cache, value_cache, key, value, *where)


def _capacity(cache: Tensor, block_table: Tensor | None) -> int:
    """The keys that an entry, or a row of the block table, has room for."""
    return cache.shape[2] * (1 if block_table is None else block_table.shape[1])
