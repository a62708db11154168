"""The definition of attention.

``scaled_dot_product_attention`` (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), for query
i and key j of one head, with d_ij = i + offset - j:

    s_ij = scale * (q_i . k_j + a_i . R_b(d) + P_b(-d) . k_j)
    s_ij = softcap * tanh(s_ij / softcap)      if softcap > 0
    s_ij = s_ij + mask_ij                      if the mask is floating
    s_ij = s_ij + table_(M + d'_ij)            of a relative bias of 2 M + 1 distances, with
                                               d'_ij = position_(i + offset) - position_j
    s_ij = s_ij + rows_iy + columns_ix         of an image, key j = (y, x) = (j // w, j % w)
    s_ij = s_ij - slope * |d_ij|               ALiBi, https://arxiv.org/abs/2108.12409
    s_ij = -inf                                unless -window_right <= d_ij <= window_left,
                                               mask_ij is neither False nor -inf, the relative
                                               bias is not -inf, and the mask program makes the
                                               pair visible
    lse_i = log(sum_j exp(s_ij) + exp(sink))   the sink only if there is one
    w_ij = exp(s_ij - lse_i)                   0 where s_ij = -inf, even in a fully masked row
    w_ij = w_ij * kept_ij * 65536 / T          T = round((1 - dropout_p) * 65536)
    o_i  = sum_j w_ij v_j

The terms with a position query a_i and rows R_b and P_b of two tables exist only if these are
given; d is d_ij, and b the bucket of a distance. The sink is a logit of the query head: a key whose
value is 0, which every query can see, and to which none of the steps before lse applies. A window
of -1 is unlimited on that side. kept_ij is 0 or 1, drawn by Philox4x32-10 (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405), see :func:`dropout_keep`; T = 0 keeps nothing. For the
draws, i, j and the head count from ``first_query``, ``first_key`` and ``first_head``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends._partial import backward_of_part
from fastattn.backends._precision import without_autocast
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference._dropout import dropout_keep, kept_scale
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.backends.reference._masked import (
    INF,
    compute_dtype,
    distances,
    dot_products,
    matmul,
    softmax,
    visible_pairs,
    weighted_sum,
)
from fastattn.backends.reference._vjp import backward_of


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor
    | None = None,  # [B|1, Hq|1, Lq|1, Lk|1], bool (True takes part) or floating (added)
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,  # [] int64
    sinks: Tensor | None = None,  # [B|1, Hq]
    relative_bias: Tensor | None = None,  # [B|1, Hq, 2 M + 1]
    positions: Tensor | None = None,  # [Lk] int32, None: 0, 1, 2, ...
    mask_program: Tensor | None = None,  # [size] int32, see backends/_mask_program.py
    position_query: Tensor | None = None,  # [B, Hq, Lq, D], with query_table
    query_table: Tensor | None = None,  # [B|1, Hq, buckets, D]
    key_table: Tensor | None = None,  # [B|1, Hq, buckets, D]
    distance_buckets: Tensor | None = None,  # [2 M + 1] int32, of d = -M, ..., M
    row_bias: Tensor | None = None,  # [B, Hq, Lq, h]: of an image of h x w keys
    column_bias: Tensor | None = None,  # [B, Hq, Lq, w]
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq], weights)``, see the equations above.

    The weights are one matrix per head [B, Hq, Lq, Lk], or their mean over the heads [B, Lq, Lk],
    or an empty tensor if not requested. They are the w that multiply v, after dropout, in the
    dtype of the query.
    """
    out, lse, applied = attend(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        seed,
        options,
        sinks=sinks,
        relative_bias=relative_bias,
        positions=positions,
        mask_program=mask_program,
        position_terms=(position_query, query_table, key_table, distance_buckets),
        image_biases=(row_bias, column_bias),
    )
    applied = reduce_weights(applied, options.weights).to(query.dtype)
    return out.to(query.dtype), lse.double(), applied


scaled_dot_product_attention_backward = backward_of_part(scaled_dot_product_attention)(
    backward_of(
        scaled_dot_product_attention,
        results="out lse weights",
        takes="grad_out grad_lse grad_weights query key value attn_mask alibi_slopes seed out lse "
        "sinks relative_bias positions mask_program position_query query_table key_table "
        "distance_buckets row_bias column_bias",
        gives="query key value attn_mask sinks relative_bias position_query query_table key_table "
        "row_bias column_bias",
    )
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    options: AttentionOptions,
    *,
    distance: Tensor | None = None,
    keep: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    modify: Callable[[Tensor], Tensor] | None = None,
    position_terms: tuple[Tensor | None, ...] = (),  # position_query, tables, distance_buckets
    image_biases: tuple[Tensor | None, ...] = (None, None),  # row_bias, column_bias
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, w)`` in the dtype of the computation.

    ``modify`` maps the scaled scores to other scores, and may exclude pairs by -inf. If sequences
    differ in length, ``distance`` is d_ij of every pair, ``keep`` says which pairs dropout keeps,
    and ALiBi has one slope per row, [B, Hq, Lq].
    """
    batch, q_heads, q_len, _ = query.shape
    k_len = key.shape[-2]
    compute = compute_dtype(query.dtype)
    q, k, v = query.to(compute), key.to(compute), value.to(compute)
    if distance is None:
        distance = distances(q_len, k_len, options.offset, query.device)
    visible = visible_pairs(distance, attn_mask, options.window_left, options.window_right)
    bias = None
    if relative_bias is not None:
        bias = _gather_biases(relative_bias.to(compute), positions, distance, options.offset)
    rows, columns = image_biases
    if rows is not None and columns is not None:
        image = (rows[..., None] + columns[..., None, :]).flatten(3).to(compute)
        bias = image if bias is None else bias + image
    if bias is not None:
        visible = bias != -INF if visible is None else visible & (bias != -INF)
    if mask_program is not None:
        pairs = visible_by_program(mask_program, batch, q_len, k_len)
        visible = pairs if visible is None else visible & pairs
    # Without exclusions, plain products are correct, even with NaN and inf.
    guarded = visible is not None or modify is not None

    with without_autocast(query.device.type):
        s = dot_products(q, k, guarded)  # [B, Hq, Lq, Lk]
        if any(x is not None for x in position_terms):
            s = s + _position_scores(q, k, *position_terms, distance=distance, guarded=guarded)
        if visible is not None:
            s = torch.where(visible, s, 0.0)  # keep NaN out of later derivatives
        s = s * options.scale
        if modify is not None:
            s = modify(s)
        if options.softcap > 0:
            s = options.softcap * torch.tanh(s / options.softcap)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            s = s + attn_mask.to(compute)
        if bias is not None:
            s = s + bias
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 3 else alibi_slopes[:, :, None]
            s = s - slopes.to(compute)[..., None] * distance.abs()
        if visible is not None:
            s = torch.where(visible, s, -INF)

        w, lse = softmax(s) if sinks is None else _softmax_with_sinks(s, sinks.to(compute))
        if options.dropout_p > 0:
            if keep is None:
                assert seed is not None
                first = options.first_query, options.first_key, options.first_head
                shape = (batch, q_heads, q_len, k_len)
                keep = dropout_keep(shape, options.dropout_p, seed, first)
            w = torch.where(keep, w * kept_scale(options.dropout_p), 0.0)
        if not guarded:
            return matmul(w, v), lse, w
        visible_scores = s != -INF
        out = weighted_sum(w, v, visible_scores)
        # A fully masked row is already 0. Its gradient, even inf, must stop here.
        out = torch.where(visible_scores.any(-1, keepdim=True), out, 0.0)
        return out, lse, w


def _position_scores(
    query: Tensor,
    key: Tensor,
    position_query: Tensor | None,
    query_table: Tensor | None,
    key_table: Tensor | None,
    distance_buckets: Tensor | None,
    *,
    distance: Tensor,  # [Lq, Lk]
    guarded: bool,
) -> Tensor:
    """a_i . R[b(d_ij)] + P[b(-d_ij)] . k_j, [B, Hq, Lq, Lk]."""
    assert distance_buckets is not None
    middle, pairs = distance_buckets.shape[0] // 2, (*query.shape[:3], key.shape[2])
    total = query.new_zeros(())
    if query_table is not None:
        assert position_query is not None
        rows, table = position_query.to(query.dtype), query_table.to(query.dtype)
        products = dot_products(rows, table.expand(pairs[0], -1, -1, -1), guarded)
        total = total + products.gather(3, distance_buckets[middle + distance].long().expand(pairs))
    if key_table is not None:
        table = key_table.to(query.dtype).expand(pairs[0], -1, -1, -1)
        products = dot_products(table, key, guarded)  # [B, Hq, buckets, Lk]
        total = total + products.gather(2, distance_buckets[middle - distance].long().expand(pairs))
    return total


def _gather_biases(
    table: Tensor, positions: Tensor | None, distance: Tensor, offset: int
) -> Tensor:
    """Gather the bias of every pair [B|1, Hq, Lq, Lk] from a table [B|1, Hq, 2 M + 1] of distances.

    Distances are [Lq, Lk], or [B, 1, Lq, Lk] with one table for all sequences.
    """
    if positions is not None:
        distance = positions[offset : offset + distance.shape[0], None] - positions
    rows = F.embedding(distance + table.shape[2] // 2, table.flatten(0, 1).mT)  # [..., B Hq]
    if distance.dim() == 4:
        return rows.squeeze(1).movedim(-1, 1)
    return rows.permute(2, 0, 1).unflatten(0, table.shape[:2])


def _softmax_with_sinks(s: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the keys, and logsumexp with the sinks, [B|1, Hq] or one per row.

    A sink of inf has all the weight.
    """
    sinks = sinks if sinks.dim() == 3 else sinks[:, :, None]
    sinks = sinks.expand(s.shape[:3])
    finite_sinks = sinks.clamp(max=torch.finfo(s.dtype).max)
    w, lse = softmax(torch.cat([s, finite_sinks[..., None]], -1))
    return w[..., :-1], torch.where(sinks == INF, sinks, lse)


def reduce_weights(w: Tensor, weights: int) -> Tensor:
    """Return no weights [0], all [B, Hq, Lq, Lk], or their mean over heads: ``weights`` 0, 1, 2."""
    if weights == 0:
        return w.new_empty(0)
    return w if weights == 1 else w.sum(1) / max(w.shape[1], 1)
