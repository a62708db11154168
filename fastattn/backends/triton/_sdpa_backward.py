"""The backward kernels of attention: two passes without atomics, bitwise equal in every run.

With dp_ij = (do_i . v_j + gw_ij) * kept_ij * kept_scale and delta_i = sum_j p_ij dp_ij,

    d loss / d s_ij = p_ij (dp_ij - delta_i + glse_i)

where gw and glse are the gradients of the weights and of lse. Without gw, delta is out_i . do_i,
which needs no pass over the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    INF,
    LOG2E,
    any_query_sees,
    dropout_keep,
    exponent_unit,
    first_row,
    load_matrix_tile,
    load_rows,
    load_statistics,
    locate,
    probabilities,
    scores,
    sink_score,
    start_with_sink,
    store_rows,
    update_softmax,
    visible_and_bias,
    visible_keys,
    visible_queries,
    wait_for_loads,
)
from fastattn.backends.triton._mask_program import NONE, SOME, program_pairs, tile_coverage


@triton.jit
def score_gradients(
    b_v,  # [BN, BDV]
    b_do,  # [BM, BDV]
    high,  # [BM]
    low,  # [BM]
    delta,  # [BM]
    g,  # Gradients
    seq,
    i_h,
    row,
    col,
    s,
    visible,
    opt,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the weights without the factor of dropout, and d loss / d s, both [BM, BN]."""
    p = tl.where(visible, probabilities(s, high, low, exponent_unit(opt), opt), 0.0)
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if g.weights is not None:
        grad_weights = load_matrix_tile(g.weights, seq, i_h, row, col, 0.0, BM, BN)
        dp += grad_weights.to(tl.float32) * g.weight_share
    w = p
    if opt.p_seed is not None:
        keep = dropout_keep(seq, i_h, row + tl.arange(0, BM), col, opt, BM, BN)
        dp = tl.where(keep, dp * opt.kept_scale, 0.0)
        w = tl.where(keep, p, 0.0)
    # Selected: the gradient of a fully masked row may be NaN.
    ds = tl.where(visible & (high != INF)[:, None], p * (dp - delta[:, None]), 0.0)
    return w, ds


@triton.jit
def _sees_any_key(seq, i_h, row, lo, hi, opt, BM: tl.constexpr, BN: tl.constexpr):
    """Whether each query of a tile [BM] can see a key; the window shows the tile [lo, hi)."""
    o_m = row + tl.arange(0, BM)
    zero = tl.zeros([BM], tl.int32)
    begin = zero
    end = zero + seq.k_len
    if opt.left is not None:
        begin = tl.maximum(begin, o_m + seq.offset - opt.left)
    if opt.right is not None:
        end = tl.minimum(end, o_m + seq.offset + opt.right + 1)
    sees_key = begin < end
    if opt.excludes is not None:
        any_visible = zero
        for col in range(lo // BN * BN, hi, BN):
            visible, bias = visible_and_bias(seq, i_h, row, col, opt, True, BM, BN)
            if opt.p_program is not None:
                visible = visible & program_pairs(SOME, seq, i_h, row, col, opt, BM, BN)
            any_visible = tl.maximum(any_visible, tl.max(visible.to(tl.int32), axis=1))
        sees_key = any_visible > 0
    return sees_key


@triton.jit
def attention_backward_statistics(
    q,
    k,
    v,
    out,  # [B, Hq, Lq, Dv]
    g,
    opt,
    p_lse,  # [B, Hq, Lq] float64
    stats,
    p_grad_sinks,  # [B, Hq, Lq] float32: the gradient of the sink of each row, or None
    EXACT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store the :class:`Statistics` of one tile of queries, and the gradients of their sinks.

    lse is stored in two floats, because the rounding error of a single one would be in every
    exp(s - lse). A fully masked row gets +inf, so that its probabilities are 0.

    delta = out . do contains the rounding error of out. EXACT uses it as an estimate and adds the
    remainder sum_j p_ij (dp_ij - estimate), with the probabilities of the backward kernels.
    """
    unit = exponent_unit(opt)
    seq, i_h, tile = locate(opt, False, BM)
    row = tile * BM
    if row >= seq.q_len:
        return
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    o_rows = first_row(opt, seq, i_h) + o_m
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, opt, BN)

    lse = tl.load(p_lse + o_rows, mask=m_m, other=-INF)
    sees_key = lse != -INF
    has_weight = sees_key
    if opt.sinks is not None:
        sees_key = sees_key & (lse != INF) & _sees_any_key(seq, i_h, row, lo, hi, opt, BM, BN)
    if opt.rescored is None:
        lse = lse * LOG2E
    high = lse.to(tl.float32)
    low = (lse - high.to(tl.float64)).to(tl.float32)
    high = tl.where(sees_key, high, INF)
    low = tl.where(sees_key & (tl.abs(high) != INF), low, 0.0)
    if opt.added_mask is not None or opt.table is not None:
        # If the maximum m is huge, for example finfo.min of a mask, then lse = m + log(l) has lost
        # log(l), even in float64. So m and l are computed again.
        imprecise = sees_key & (tl.abs(high) > 2.0**30)
        if tl.max(imprecise.to(tl.int32), axis=0) > 0:
            m = tl.full([BM], -INF, tl.float32)
            l = tl.zeros([BM], tl.float32)
            if opt.sinks is not None:
                m, l = start_with_sink(opt, seq.i_b, i_h, BM)
            for col in range(lo // BN * BN, hi, BN):
                coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
                if coverage != NONE:
                    o_n = col + tl.arange(0, BN)
                    b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, o_n < seq.k_len, D, BD)
                    s, visible, slope = scores(
                        b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION
                    )
                    m, l, p, shrink = update_softmax(m, l, s, unit, opt)
            high = tl.where(imprecise, m, high)
            low = tl.where(imprecise, tl.log(l), low)
    tl.store(stats.p_high + o_rows, high, mask=m_m)
    tl.store(stats.p_low + o_rows, low, mask=m_m)

    if g.out is not None:
        b_out = load_rows(out, seq.q_base, i_h, o_m, m_m & sees_key, DV, BDV).to(tl.float32)
        b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & sees_key, DV, BDV)
        delta = tl.sum(b_out * b_do.to(tl.float32), axis=1)
        sink_weight = tl.zeros([BM], tl.float32)
        if opt.sinks is not None:
            sink = tl.zeros([BM, 1], tl.float32) + sink_score(opt, seq.i_b, i_h)
            sink_weight = tl.sum(probabilities(sink, high, low, unit, opt), axis=1)
        if EXACT or g.weights is not None:
            correction = -sink_weight * delta  # the sink is a key whose value is 0
            for col in range(lo // BN * BN, hi, BN):
                coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
                if coverage != NONE:
                    o_n = col + tl.arange(0, BN)
                    m_n = (o_n >= lo) & (o_n < hi)
                    b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, m_n, D, BD)
                    b_v = load_rows(v, seq.k_base, i_h // opt.group, o_n, m_n, DV, BDV)
                    wait_for_loads(b_v, PRECISION)
                    s, visible, slope = scores(
                        b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION
                    )
                    w, ds = score_gradients(
                        b_v, b_do, high, low, delta, g,
                        seq, i_h, row, col, s, visible, opt, BM, BN, PRECISION,
                    )  # fmt: skip
                    correction += tl.sum(ds, axis=1)
            delta += correction
        if g.lse is not None:
            p_gl = g.lse.p + seq.q_base * g.lse.b + i_h * g.lse.h + o_m.to(tl.int64) * g.lse.l
            delta -= tl.load(p_gl, mask=m_m & sees_key, other=0.0).to(tl.float32)
        tl.store(stats.p_delta + o_rows, delta, mask=m_m)
        if p_grad_sinks is not None:
            grad_sink = tl.where(sees_key, -sink_weight * delta, 0.0)
            if g.lse is not None:
                only_sink = m_m & has_weight & (high == INF)  # the sink alone, whose weight is 1
                grad_sink += tl.load(p_gl, mask=only_sink, other=0.0).to(tl.float32)
            tl.store(p_grad_sinks + o_rows, grad_sink, mask=m_m)


@triton.jit
def attention_backward_query(
    q,
    k,
    v,
    g,
    opt,
    stats,
    grad_q,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """dq_i = scale * sum_j ds_ij k_j for one tile of queries of one head."""
    seq, i_h, tile = locate(opt, False, BM)
    if tile * BM >= seq.q_len:
        return
    row = (tl.cdiv(seq.q_len, BM) - 1 - tile) * BM
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    o_rows = first_row(opt, seq, i_h) + o_m
    high, low, delta = load_statistics(stats, o_rows, m_m)
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & (high != INF), DV, BDV)
    acc = tl.zeros([BM, BD], tl.float32)

    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, opt, BN)
    for col in range(lo // BN * BN, hi, BN):
        coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
        if coverage != NONE:
            o_n = col + tl.arange(0, BN)
            m_n = (o_n >= lo) & (o_n < hi)
            b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, m_n, D, BD)
            b_v = load_rows(v, seq.k_base, i_h // opt.group, o_n, m_n, DV, BDV)
            wait_for_loads(b_v, PRECISION)
            s, visible, slope = scores(b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION)
            w, ds = score_gradients(
                b_v, b_do, high, low, delta, g,
                seq, i_h, row, col, s, visible, opt, BM, BN, PRECISION,
            )  # fmt: skip
            if opt.excludes is not None:  # 0 * NaN would be NaN
                m_n = m_n & any_query_sees(visible)
                b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, m_n, D, BD)
            acc = tl.dot((ds * slope).to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    store_rows(grad_q, seq.q_base, i_h, o_m, m_m, acc * opt.scale, D, BD)


@triton.jit
def attention_backward_key_value(
    q,
    k,
    v,
    g,
    opt,
    stats,
    grad_k,
    grad_v,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """dv_j = sum_i w_ij do_i and dk_j = scale * sum_i ds_ij q_i for one tile of keys of one head.

    The query heads that share the key head are summed here, one after the other.
    """
    seq, i_hkv, tile = locate(opt, True, BN)
    col = tile * BN
    if col >= seq.k_len:
        return
    o_n = col + tl.arange(0, BN)
    m_n = o_n < seq.k_len
    b_k = load_rows(k, seq.k_base, i_hkv, o_n, m_n, D, BD)
    b_v = load_rows(v, seq.k_base, i_hkv, o_n, m_n, DV, BDV)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BDV], tl.float32)

    last = tl.minimum(col + BN, seq.k_len) - 1
    lo, hi = visible_queries(col, last, seq, opt, BM)
    for i_h in range(i_hkv * opt.group, i_hkv * opt.group + opt.group):
        o_head = first_row(opt, seq, i_h)
        for row in range(lo, hi, BM):
            coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
            if coverage != NONE:
                o_m = row + tl.arange(0, BM)
                m_m = o_m < seq.q_len
                high = tl.load(stats.p_high + o_head + o_m, mask=m_m, other=INF)
                low = tl.load(stats.p_low + o_head + o_m, mask=m_m, other=0.0)
                delta = tl.load(stats.p_delta + o_head + o_m, mask=m_m, other=0.0)
                m_m = m_m & (high != INF)
                b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
                b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m, DV, BDV)
                wait_for_loads(b_v, PRECISION)
                s, visible, slope = scores(
                    b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION
                )
                w, ds = score_gradients(
                    b_v, b_do, high, low, delta, g,
                    seq, i_h, row, col, s, visible, opt, BM, BN, PRECISION,
                )  # fmt: skip
                acc_v = tl.dot(tl.trans(w.to(b_do.dtype)), b_do, acc_v, input_precision=PRECISION)
                ds = (ds * slope).to(b_q.dtype)
                acc_k = tl.dot(tl.trans(ds), b_q, acc_k, input_precision=PRECISION)
    if opt.p_seed is not None:
        acc_v = acc_v * opt.kept_scale
    store_rows(grad_k, seq.k_base, i_hkv, o_n, m_n, acc_k * opt.scale, D, BD)
    store_rows(grad_v, seq.k_base, i_hkv, o_n, m_n, acc_v, DV, BDV)
