"""The forward kernels of attention: the output with its log-sum-exp, and the weights."""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    any_query_sees,
    batch_sequence,
    dropout_keep,
    exponent_unit,
    first_row,
    load_rows,
    locate,
    log_sum_exp,
    matrix_tile,
    probabilities,
    scores,
    start_softmax,
    start_with_sink,
    store_rows,
    update_softmax,
    visible_keys,
)
from fastattn.backends.triton._mask_program import NONE, tile_coverage


@triton.jit
def _attend_to(
    m,  # [BM]
    l,  # [BM]
    acc,  # [BM, BDV]
    start,  # a multiple of BN
    end,
    lo,  # keys of [start, end) in [lo, hi) are visible to at least one query
    hi,
    b_q,  # [BM, BD]
    k,
    v,
    seq,
    i_h,
    row,
    o,
    CHECKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Update the state of the softmax with the keys [start, end)."""
    unit = exponent_unit(o)
    for first in range(start, end, BN):
        coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
        if coverage != NONE:
            o_n = first + tl.arange(0, BN)
            m_n = (o_n >= lo) & (o_n < hi)
            b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, m_n, D, BD)
            s, visible, slope = scores(
                b_q, b_k, seq, i_h, row, first, coverage, o, CHECKED, PRECISION
            )
            m, l, p, shrink = update_softmax(m, l, s, unit, o)
            if o.p_seed is not None:
                p = tl.where(
                    dropout_keep(seq, i_h, row + tl.arange(0, BM), first, o, BM, BN), p, 0.0
                )
            if o.excludes is not None:
                m_n = m_n & any_query_sees(visible)  # 0 * NaN would be NaN
            b_v = load_rows(v, seq.k_base, i_h // o.group, o_n, m_n, DV, BDV)
            # acc = acc * exp(m_old - m) + p @ v
            acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc


@triton.jit
def attention_forward(
    q,  # [B, Hq, Lq, D]
    k,  # [B, Hkv, Lk, D]
    v,  # [B, Hkv, Lk, Dv]
    o,
    out,  # [B, Hq, Lq, Dv]
    p_lse,  # [B, Hq, Lq] float64
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out = softmax(scores) @ v for one tile of queries of one head."""
    seq, i_h, tile = locate(o, False, BM)
    if tile * BM >= seq.q_len:
        return
    row = (tl.cdiv(seq.q_len, BM) - 1 - tile) * BM  # causal: the tiles with most keys start first
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    m, l, acc = start_softmax(BM, BDV)
    if o.sinks is not None:
        m, l = start_with_sink(o, seq.i_b, i_h, BM)
    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, o, BN)
    if o.left is not None:
        m, l, acc = _attend_to(
            m, l, acc, lo // BN * BN, tl.minimum(full_lo, hi), lo, hi, b_q, k, v, seq, i_h, row, o,
            True, BM, BN, D, DV, BD, BDV, PRECISION,
        )  # fmt: skip
    m, l, acc = _attend_to(
        m, l, acc, full_lo, full_hi, lo, hi, b_q, k, v, seq, i_h, row, o,
        False, BM, BN, D, DV, BD, BDV, PRECISION,
    )  # fmt: skip
    m, l, acc = _attend_to(
        m, l, acc, full_hi, hi, lo, hi, b_q, k, v, seq, i_h, row, o,
        True, BM, BN, D, DV, BD, BDV, PRECISION,
    )  # fmt: skip

    if o.p_seed is not None:
        acc = acc * o.kept_scale
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    store_rows(out, seq.q_base, i_h, o_m, m_m, acc, DV, BDV)
    lse = log_sum_exp(m, l, exponent_unit(o), o)
    tl.store(p_lse + first_row(o, seq, i_h) + o_m, lse, mask=m_m)


@triton.jit
def attention_weights(
    q,
    k,
    o,
    stats,
    weights,  # [B, Hq, Lq, Lk], or [B, 1, Lq, Lk]
    AVERAGED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The weights of one tile of pairs, for one head or averaged over all heads."""
    unit = exponent_unit(o)
    i_matrix, row, first = matrix_tile(o.q_len, o.k_len, BM, BN)
    o_m = row + tl.arange(0, BM)
    o_n = first + tl.arange(0, BN)
    m_m = o_m < o.q_len
    if AVERAGED:
        i_b = i_matrix
        head = i_matrix * 0
        end = head + o.heads
    else:
        i_b = i_matrix // o.heads
        head = i_matrix % o.heads
        end = head + 1

    seq = batch_sequence(o, i_b)
    total = tl.zeros([BM, BN], tl.float32)
    for i_h in range(head, end):
        coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
        if coverage != NONE:
            b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
            b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, o_n < o.k_len, D, BD)
            s, visible, slope = scores(b_q, b_k, seq, i_h, row, first, coverage, o, True, PRECISION)
            o_rows = (i_b * o.heads + i_h) * o.q_len + o_m
            high = tl.load(stats.p_high + o_rows, mask=m_m, other=0.0)
            low = tl.load(stats.p_low + o_rows, mask=m_m, other=0.0)
            p = tl.where(visible, probabilities(s, high, low, unit, o), 0.0)
            if o.p_seed is not None:
                p = tl.where(
                    dropout_keep(seq, i_h, row + tl.arange(0, BM), first, o, BM, BN),
                    p * o.kept_scale,
                    0.0,
                )
            total += p
    if AVERAGED:
        total = total / o.heads
    p_w = weights.p + i_b * weights.b + head * weights.h
    p_w = p_w + o_m.to(tl.int64)[:, None] * weights.l
    p_w = p_w + o_n.to(tl.int64)[None, :] * weights.d
    tl.store(
        p_w, total.to(weights.p.dtype.element_ty), mask=m_m[:, None] & (o_n < o.k_len)[None, :]
    )
