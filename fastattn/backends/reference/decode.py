"""The definition of attention over a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionOptions, DecodeOptions
from fastattn.backends.reference.sdpa import attend

__all__ = ["append_to_cache", "decode_attention"]


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
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])``: attention over the first keys of a cache.

    Sequence b uses the first cache_seqlens[b] keys of its entry, or of the pages in its row of the
    block table. Its last query is at the position of the last of these keys.
    """
    key, value = (_of_sequences(x, query, block_table, cache_batch_idx) for x in (
        key_cache, value_cache))  # fmt: skip
    position = torch.arange(key.shape[2], device=query.device)
    lengths = cache_seqlens[:, None, None, None]
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    # Keys beyond a sequence have no distance; 0 is in every table.
    distance = torch.where(position < lengths, rows + lengths - query.shape[2] - position, 0)
    out, lse, _ = attend(
        query,
        key,
        value,
        position < lengths,
        alibi_slopes,
        None,
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
) -> None:
    """Append the new keys and values to each sequence, in place."""
    at = cache_seqlens[:, None] + torch.arange(key.shape[2], device=key.device)  # [B, L]
    if block_table is not None:
        page = key_cache.shape[2]
        entry = block_table.long().gather(1, at // page)
        at = at % page
    elif cache_batch_idx is not None:
        entry = cache_batch_idx[:, None]
    else:
        entry = torch.arange(key.shape[0], device=key.device)[:, None]
    key_cache[entry, :, at] = key.transpose(1, 2)
    value_cache[entry, :, at] = value.transpose(1, 2)


def _of_sequences(
    cache: Tensor, query: Tensor, block_table: Tensor | None, entries: Tensor | None
) -> Tensor:
    """The keys of every sequence in order, [B, Hkv, P * N, D]."""
    if block_table is not None:
        # Page numbers beyond a sequence's length may be invalid; no query can see those keys.
        pages = block_table.long().clamp(0, max(cache.shape[0] - 1, 0))
        return cache[pages].transpose(1, 2).flatten(2, 3)
    return cache[: query.shape[0]] if entries is None else cache[entries]
