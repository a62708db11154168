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
def _attend_to_keys(
    m,  # [BM]
    l,  # [BM]
    acc,  # [BM, BDV]
    start,  # a multiple of BN
    end,
    lo,  # outside [lo, hi), the window hides the keys from all queries of the tile
    hi,
    b_q,  # [BM, BD]
    k,
    v,
    seq,
    i_h,
    row,
    opt,
    CHECKED: tl.constexpr,  # whether to check the window and the tails
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the state (m, l, acc) of the online softmax after the keys [start, end)."""
    unit = exponent_unit(opt)
    for col in range(start, end, BN):
        coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
        if coverage != NONE:
            o_n = col + tl.arange(0, BN)
            m_n = (o_n >= lo) & (o_n < hi)
            b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, m_n, D, BD)
            s, visible, slope = scores(
                b_q, b_k, seq, i_h, row, col, coverage, opt, CHECKED, PRECISION
            )
            m, l, p, shrink = update_softmax(m, l, s, unit, opt)
            if opt.p_seed is not None:
                p = tl.where(
                    dropout_keep(seq, i_h, row + tl.arange(0, BM), col, opt, BM, BN), p, 0.0
                )
            if opt.excludes is not None:
                m_n = m_n & any_query_sees(visible)  # 0 * NaN would be NaN
            b_v = load_rows(v, seq.k_base, i_h // opt.group, o_n, m_n, DV, BDV)
            # acc = acc * exp(m_old - m) + p @ v
            acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc


@triton.jit
def attention_forward(
    q,  # [B, Hq, Lq, D]
    k,  # [B, Hkv, Lk, D]
    v,  # [B, Hkv, Lk, Dv]
    opt,
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
    seq, i_h, tile = locate(opt, False, BM)
    if tile * BM >= seq.q_len:
        return
    row = (tl.cdiv(seq.q_len, BM) - 1 - tile) * BM  # causal: the tiles with most keys start first
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    m, l, acc = start_softmax(BM, BDV)
    if opt.sinks is not None:
        m, l = start_with_sink(opt, seq.i_b, i_h, BM)
    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, opt, BN)
    if opt.left is not None:
        m, l, acc = _attend_to_keys(
            m, l, acc, lo // BN * BN, tl.minimum(full_lo, hi), lo, hi, b_q, k, v, seq, i_h, row,
            opt, True, BM, BN, D, DV, BD, BDV, PRECISION,
        )  # fmt: skip
    m, l, acc = _attend_to_keys(
        m, l, acc, full_lo, full_hi, lo, hi, b_q, k, v, seq, i_h, row, opt,
        False, BM, BN, D, DV, BD, BDV, PRECISION,
    )  # fmt: skip
    m, l, acc = _attend_to_keys(
        m, l, acc, full_hi, hi, lo, hi, b_q, k, v, seq, i_h, row, opt,
        True, BM, BN, D, DV, BD, BDV, PRECISION,
    )  # fmt: skip

    if opt.p_seed is not None:
        acc = acc * opt.kept_scale
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    store_rows(out, seq.q_base, i_h, o_m, m_m, acc, DV, BDV)
    lse = log_sum_exp(m, l, exponent_unit(opt), opt)
    tl.store(p_lse + first_row(opt, seq, i_h) + o_m, lse, mask=m_m)


@triton.jit
def attention_weights(
    q,
    k,
    opt,
    stats,
    weights,  # [B, Hq, Lq, Lk], or [B, 1, Lq, Lk]
    AVERAGED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The weights of one tile [BM, BN], for one head or averaged over all heads."""
    unit = exponent_unit(opt)
    i_matrix, row, col = matrix_tile(opt.q_len, opt.k_len, BM, BN)
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    m_m = o_m < opt.q_len
    if AVERAGED:
        i_b = i_matrix
        head = i_matrix * 0
        end = head + opt.heads
    else:
        i_b = i_matrix // opt.heads
        head = i_matrix % opt.heads
        end = head + 1

    seq = batch_sequence(opt, i_b)
    total = tl.zeros([BM, BN], tl.float32)
    for i_h in range(head, end):
        coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
        if coverage != NONE:
            b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
            b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, o_n < opt.k_len, D, BD)
            s, visible, slope = scores(b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION)
            o_rows = (i_b * opt.heads + i_h) * opt.q_len + o_m
            high = tl.load(stats.p_high + o_rows, mask=m_m, other=0.0)
            low = tl.load(stats.p_low + o_rows, mask=m_m, other=0.0)
            p = tl.where(visible, probabilities(s, high, low, unit, opt), 0.0)
            if opt.p_seed is not None:
                p = tl.where(
                    dropout_keep(seq, i_h, row + tl.arange(0, BM), col, opt, BM, BN),
                    p * opt.kept_scale,
                    0.0,
                )
            total += p
    if AVERAGED:
        total = total / opt.heads
    p_w = weights.p + i_b * weights.b + head * weights.h
    p_w = p_w + o_m.to(tl.int64)[:, None] * weights.l
    p_w = p_w + o_n.to(tl.int64)[None, :] * weights.d
    tl.store(
        p_w, total.to(weights.p.dtype.element_ty), mask=m_m[:, None] & (o_n < opt.k_len)[None, :]
    )
