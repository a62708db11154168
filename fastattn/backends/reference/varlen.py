"""The definition of attention over packed sequences.

Packed rows are one long attention in which a query can see only keys of the same sequence, so no
shape depends on the lengths. Positions count within a sequence. The draws of the dropout use these
positions too, with the index of the sequence as the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends._sequences import locate_rows
from fastattn.backends.primitives import AttentionOptions, VarlenOptions, convert_options
from fastattn.backends.reference._dropout import WORD, keep_threshold, philox4x32
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.backends.reference._masked import INF
from fastattn.backends.reference._vjp import backward_of
from fastattn.backends.reference.sdpa import attend


def varlen_attention(
    query: Tensor,  # [Tq, Hq, D]
    key: Tensor,  # [Tk, Hkv, D]
    value: Tensor,  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1] int64
    cu_seqlens_k: Tensor,  # [B + 1] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,  # [] int64
    sinks: Tensor | None = None,  # [1, Hq]
    relative_bias: Tensor | None = None,  # [1, Hq, 2 M + 1]
    mask_program: Tensor | None = None,  # [size] int32, of packed sequences
    position_query: Tensor | None = None,  # [Tq, Hq, D], with query_table
    query_table: Tensor | None = None,  # [1, Hq, buckets, D]
    key_table: Tensor | None = None,  # [1, Hq, buckets, D]
    distance_buckets: Tensor | None = None,  # [2 M + 1] int32, of d = -M, ..., M
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [Tq, Hq, Dv], lse [Hq, Tq])``: attention within every sequence.

    Sequence b has the queries cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1, and the keys likewise.
    Queries after the last sequence are fully masked, and no query can see keys after it.
    """
    q_sequence, q_local, q_lengths = locate_rows(cu_seqlens_q, query.shape[0])
    k_sequence, k_local, k_lengths = locate_rows(cu_seqlens_k, key.shape[0])
    batch = cu_seqlens_q.shape[0] - 1
    visible = (q_sequence[:, None] == k_sequence) & (q_sequence[:, None] < batch)  # [Tq, Tk]
    offset = (
        (k_lengths - q_lengths)[q_sequence] if options.bottom_right else torch.zeros_like(q_local)
    )
    if mask_program is not None:
        rows = query.shape[0], key.shape[0]
        visible = visible & visible_by_program(mask_program, 1, *rows, packed_keys=k_local)[0, 0]
    # A pair of different sequences has no distance and reads entry 0, which every table has.
    distance = torch.where(visible, (q_local + offset)[:, None] - k_local, 0)
    sequence = q_sequence.clamp(max=max(batch - 1, 0))

    def per_row(x: Tensor | None) -> Tensor | None:
        """Repeat the numbers [B|1, Hq] of the sequences for their rows, [1, Hq, Tq]."""
        if x is None:
            return None
        if batch == 0:  # rows outside all sequences are fully masked
            return x.new_zeros((1, x.shape[1], sequence.shape[0]))
        return x.expand(batch, -1)[sequence].mT[None]

    keep = None
    if options.dropout_p > 0:
        assert seed is not None
        heads = torch.arange(query.shape[1], device=query.device)[:, None, None]
        counters = (q_local[:, None], k_local, heads, q_sequence[:, None])
        keep = _dropout_keep_at(counters, options.dropout_p, seed)
    q, k, v, a = (
        None if x is None else x.transpose(0, 1)[None] for x in (query, key, value, position_query)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    out, lse, _ = attend(
        q,
        k,
        v,
        visible[None, None],
        per_row(alibi_slopes),
        None,
        convert_options(AttentionOptions, options),
        distance=distance,
        keep=keep,
        sinks=per_row(sinks),
        relative_bias=relative_bias,
        position_terms=(a, query_table, key_table, distance_buckets),
    )
    lse = torch.where(q_sequence < batch, lse[0].double(), -INF)
    return out[0].transpose(0, 1).to(query.dtype), lse


varlen_attention_backward = backward_of(
    varlen_attention,
    results="out lse",
    takes="grad_out grad_lse query key value cu_seqlens_q cu_seqlens_k alibi_slopes seed out lse "
    "sinks relative_bias mask_program position_query query_table key_table distance_buckets",
    gives="query key value sinks relative_bias position_query query_table key_table",
)


def _dropout_keep_at(counters: tuple[Tensor, ...], dropout_p: float, seed: Tensor) -> Tensor:
    """Which pairs dropout keeps, for counters (i, j, head, batch) that broadcast to the pairs."""
    i, j, h, b = counters
    key = (seed & WORD, (seed >> 32) & WORD)
    words = torch.broadcast_tensors(*philox4x32((i, j // 8, h, b), key))
    draws = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    index = (j % 8).expand(draws.shape[:-1])[..., None]
    return draws.gather(-1, index).squeeze(-1) < keep_threshold(dropout_p)
