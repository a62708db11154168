"""The oracle of sequences with lengths of their own, see :mod:`fastattn.backends.reference`.

Packed rows are one long attention in which a query sees the keys of its own sequence alone: so
nothing here depends on how long they are. Positions count within a sequence, and so do the draws
of the dropout, whose batch is the number of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, DecodeOptions, VarlenOptions


def varlen_attention(
    query: Tensor,  # [Tq, Hq, D]
    key: Tensor,  # [Tk, Hkv, D]
    value: Tensor,  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1] int64
    cu_seqlens_k: Tensor,  # [B + 1] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,  # [] int64
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [Tq, Hq, Dv], lse [Hq, Tq])``: attention within every sequence.

    Sequence b is the queries cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1 and the keys likewise.
    Rows after the last sequence see nothing, and nobody sees them.
    """
    q_sequence, q_local, q_lengths = _places(cu_seqlens_q, query.shape[0])
    k_sequence, k_local, k_lengths = _places(cu_seqlens_k, key.shape[0])
    batch = cu_seqlens_q.shape[0] - 1
    same = (q_sequence[:, None] == k_sequence) & (q_sequence[:, None] < batch)  # [Tq, Tk]
    offset = (
        (k_lengths - q_lengths)[q_sequence] if options.bottom_right else torch.zeros_like(q_local)
    )
    distance = (q_local + offset)[:, None] - k_local
    if alibi_slopes is not None:  # a slope for every row, [1, Hq, Tq]
        of_rows = alibi_slopes.expand(batch, -1) if batch else alibi_slopes
        rows = q_sequence.clamp(max=max(batch - 1, 0))
        alibi_slopes = of_rows[rows].mT[None]
    keep = None
    if options.dropout_p > 0:
        assert seed is not None
        heads = torch.arange(query.shape[1], device=query.device)[:, None, None]
        counters = (q_local[:, None], k_local, heads, q_sequence[:, None])
        keep = _keep(counters, options.dropout_p, seed)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, lse, _ = reference.attend(
        q,
        k,
        v,
        same[None, None],
        alibi_slopes,
        None,
        AttentionOptions(
            scale=options.scale,
            window_left=options.window_left,
            window_right=options.window_right,
            softcap=options.softcap,
            dropout_p=options.dropout_p,
        ),
        distance=distance,
        keep=keep,
    )
    return out[0].transpose(0, 1).to(query.dtype), lse[0].double()


def varlen_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value: the vector-Jacobian product of the forward."""
    given = [(n, grad) for n, grad in enumerate((grad_out, grad_lse)) if grad is not None]
    if not given:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        results = varlen_attention(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            alibi_slopes,
            seed,
            options=options,
        )
        return tuple(results[n] for n, _ in given)

    vjp = torch.func.vjp(forward, query, key, value)[1]
    return vjp(tuple(grad for _, grad in given))


def decode_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key_cache: Tensor,  # [E, Hkv, N, D], E entries of N keys, or pages of N keys
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    cache_seqlens: Tensor,  # [B] int64
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    *,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])``: attention to the first keys of a cache.

    Sequence b sees the first cache_seqlens[b] keys of its entry, or of the pages that its row of
    the block table names; its last query stands at the last of them.
    """
    key, value = (_of_sequences(x, query, block_table, cache_batch_idx) for x in (
        key_cache, value_cache))  # fmt: skip
    position = torch.arange(key.shape[2], device=query.device)
    lengths = cache_seqlens[:, None, None, None]
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    out, lse, _ = reference.attend(
        query,
        key,
        value,
        position < lengths,
        alibi_slopes,
        None,
        AttentionOptions(**vars(options)),
        distance=rows + lengths - query.shape[2] - position,  # [B, 1, Lq, N]
    )
    return out.to(query.dtype), lse.double()


def append_to_cache(
    key_cache: Tensor,  # [E, Hkv, N, D]
    value_cache: Tensor,  # [E, Hkv, N, Dv]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    cache_seqlens: Tensor,  # [B] int64, without the new rows
    block_table: Tensor | None = None,  # [B, P] int32
    cache_batch_idx: Tensor | None = None,  # [B] int64
) -> None:
    """Write the new keys and values behind those of each sequence, in place."""
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
        # Pages beyond a sequence's length may have any number: they are seen by nobody.
        pages = block_table.long().clamp(0, max(cache.shape[0] - 1, 0))
        return cache[pages].transpose(1, 2).flatten(2, 3)
    return cache[: query.shape[0]] if entries is None else cache[entries]


def _places(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of every row, its position there, and the lengths; B after the last sequence.

    The lengths have one entry more, for the rows that belong to no sequence.
    """
    row = torch.arange(rows, device=starts.device)
    # Sequence b ends where b + 1 begins; empty ones share their begin and are passed over.
    sequence = (row[:, None] >= starts[1:]).sum(1)
    local = row - starts[sequence]
    lengths = torch.nn.functional.pad(starts.diff(), (0, 1))
    return sequence, local, lengths


def _keep(counters: tuple[Tensor, ...], dropout_p: float, seed: Tensor) -> Tensor:
    """What dropout keeps of pairs (i, j, head, batch) in any order, see ``dropout_keep``."""
    i, j, h, b = counters
    key = (seed & reference._WORD, (seed >> 32) & reference._WORD)
    words = torch.broadcast_tensors(*reference.philox4x32((i, j // 8, h, b), key))
    draws = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    turn = (j % 8).expand(draws.shape[:-1])[..., None]
    return draws.gather(-1, turn).squeeze(-1) < reference._keep_threshold(dropout_p)
