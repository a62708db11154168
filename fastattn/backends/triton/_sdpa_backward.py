"""The backward kernels of attention: two passes without atomics, bitwise equal in every run.

With dp_ij = (do_i . v_j + gw_ij) * kept_ij / share kept and delta_i = sum_j p_ij dp_ij,

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
    load_pairs,
    load_rows,
    load_statistics,
    locate,
    masked,
    probabilities,
    scores,
    sink_score,
    start_with_sink,
    store_rows,
    update_softmax,
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
    g,
    seq,
    i_h,
    row,
    first,
    s,
    visible,
    o,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the weights without their common factor, and d loss / d s, both [BM, BN]."""
    p = tl.where(visible, probabilities(s, high, low, exponent_unit(o), o), 0.0)
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if g.weights is not None:
        grad_weights = load_pairs(g.weights, seq, i_h, row, first, 0.0, BM, BN)
        dp += grad_weights.to(tl.float32) * g.weight_share
    w = p
    if o.p_seed is not None:
        keep = dropout_keep(seq, i_h, row + tl.arange(0, BM), first, o, BM, BN)
        dp = tl.where(keep, dp * o.kept_scale, 0.0)
        w = tl.where(keep, p, 0.0)
    # Selected: the gradient of a fully masked row may be NaN.
    ds = tl.where(visible & (high != INF)[:, None], p * (dp - delta[:, None]), 0.0)
    return w, ds


@triton.jit
def _sees_keys(seq, i_h, row, lo, hi, o, BM: tl.constexpr, BN: tl.constexpr):
    """Whether each query of a tile [BM] can see a key."""
    o_m = row + tl.arange(0, BM)
    zero = tl.zeros([BM], tl.int32)
    begin = zero
    end = zero + seq.k_len
    if o.left is not None:
        begin = tl.maximum(begin, o_m + seq.offset - o.left)
    if o.right is not None:
        end = tl.minimum(end, o_m + seq.offset + o.right + 1)
    sees = begin < end
    if o.excludes is not None:
        any_visible = zero
        for first in range(lo // BN * BN, hi, BN):
            visible, bias = masked(seq, i_h, row, first, o, True, BM, BN)
            if o.p_program is not None:
                visible = visible & program_pairs(SOME, seq, i_h, row, first, o, BM, BN)
            any_visible = tl.maximum(any_visible, tl.max(visible.to(tl.int32), axis=1))
        sees = any_visible > 0
    return sees


@triton.jit
def attention_statistics(
    q,
    k,
    v,
    out,  # [B, Hq, Lq, Dv]
    g,
    o,
    p_lse,  # [B, Hq, Lq] float64
    stats,
    p_grad_sinks,  # [B, Hq, Lq] float32: the share of each row; None without sinks
    EXACT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """lse in two floats of the exponent's unit, and delta - glse, for one tile of queries.

    With a single float, the rounding error of lse would be in every exp(s - lse). A fully masked
    row gets +inf, so that its probabilities are 0.

    out . do contains the rounding error of out. EXACT uses it as an estimate and sums the remainder
    with the same probabilities that the backward kernels use: sum_j p_ij (dp_ij - estimate).
    """
    unit = exponent_unit(o)
    seq, i_h, tile = locate(o, False, BM)
    row = tile * BM
    if row >= seq.q_len:
        return
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    o_rows = first_row(o, seq, i_h) + o_m
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, o, BN)

    lse = tl.load(p_lse + o_rows, mask=m_m, other=-INF)
    sees = lse != -INF
    exists = sees
    if o.sinks is not None:
        sees = sees & (lse != INF) & _sees_keys(seq, i_h, row, lo, hi, o, BM, BN)
    if o.rescored is None:
        lse = lse * LOG2E
    high = lse.to(tl.float32)
    low = (lse - high.to(tl.float64)).to(tl.float32)
    high = tl.where(sees, high, INF)
    low = tl.where(sees & (tl.abs(high) != INF), low, 0.0)
    if o.added_mask is not None or o.table is not None:
        # Next to such a maximum, for example finfo.min, even float64 has lost log(l), so it is
        # recomputed.
        huge = sees & (tl.abs(high) > 2.0**30)
        if tl.max(huge.to(tl.int32), axis=0) > 0:
            m = tl.full([BM], -INF, tl.float32)
            l = tl.zeros([BM], tl.float32)
            if o.sinks is not None:
                m, l = start_with_sink(o, seq.i_b, i_h, BM)
            for first in range(lo // BN * BN, hi, BN):
                coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
                if coverage != NONE:
                    o_n = first + tl.arange(0, BN)
                    b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, o_n < seq.k_len, D, BD)
                    s, visible, slope = scores(
                        b_q, b_k, seq, i_h, row, first, coverage, o, True, PRECISION
                    )
                    m, l, p, shrink = update_softmax(m, l, s, unit, o)
            high = tl.where(huge, m, high)
            low = tl.where(huge, tl.log(l), low)
    tl.store(stats.p_high + o_rows, high, mask=m_m)
    tl.store(stats.p_low + o_rows, low, mask=m_m)

    if g.out is not None:
        b_out = load_rows(out, seq.q_base, i_h, o_m, m_m & sees, DV, BDV).to(tl.float32)
        b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & sees, DV, BDV)
        delta = tl.sum(b_out * b_do.to(tl.float32), axis=1)
        sink_weight = tl.zeros([BM], tl.float32)
        if o.sinks is not None:
            sink = tl.zeros([BM, 1], tl.float32) + sink_score(o, seq.i_b, i_h)
            sink_weight = tl.sum(probabilities(sink, high, low, unit, o), axis=1)
        if EXACT or g.weights is not None:
            correction = -sink_weight * delta  # the sink is a key whose value is 0
            for first in range(lo // BN * BN, hi, BN):
                coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
                if coverage != NONE:
                    o_n = first + tl.arange(0, BN)
                    m_n = (o_n >= lo) & (o_n < hi)
                    b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, m_n, D, BD)
                    b_v = load_rows(v, seq.k_base, i_h // o.group, o_n, m_n, DV, BDV)
                    wait_for_loads(b_v, PRECISION)
                    s, visible, slope = scores(
                        b_q, b_k, seq, i_h, row, first, coverage, o, True, PRECISION
                    )
                    w, ds = score_gradients(
                        b_v, b_do, high, low, delta, g,
                        seq, i_h, row, first, s, visible, o, BM, BN, PRECISION,
                    )  # fmt: skip
                    correction += tl.sum(ds, axis=1)
            delta += correction
        if g.lse is not None:
            p_gl = g.lse.p + seq.q_base * g.lse.b + i_h * g.lse.h + o_m.to(tl.int64) * g.lse.l
            delta -= tl.load(p_gl, mask=m_m & sees, other=0.0).to(tl.float32)
        tl.store(stats.p_delta + o_rows, delta, mask=m_m)
        if p_grad_sinks is not None:
            grad_sink = tl.where(sees, -sink_weight * delta, 0.0)
            if g.lse is not None:
                only_sink = m_m & exists & (high == INF)  # the sink alone, whose weight is 1
                grad_sink += tl.load(p_gl, mask=only_sink, other=0.0).to(tl.float32)
            tl.store(p_grad_sinks + o_rows, grad_sink, mask=m_m)


@triton.jit
def attention_backward_query(
    q,
    k,
    v,
    g,
    o,
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
    seq, i_h, tile = locate(o, False, BM)
    if tile * BM >= seq.q_len:
        return
    row = (tl.cdiv(seq.q_len, BM) - 1 - tile) * BM
    o_m = row + tl.arange(0, BM)
    m_m = o_m < seq.q_len
    o_rows = first_row(o, seq, i_h) + o_m
    high, low, delta = load_statistics(stats, o_rows, m_m)
    b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
    b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & (high != INF), DV, BDV)
    acc = tl.zeros([BM, BD], tl.float32)

    last = tl.minimum(row + BM, seq.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, o, BN)
    for first in range(lo // BN * BN, hi, BN):
        coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
        if coverage != NONE:
            o_n = first + tl.arange(0, BN)
            m_n = (o_n >= lo) & (o_n < hi)
            b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, m_n, D, BD)
            b_v = load_rows(v, seq.k_base, i_h // o.group, o_n, m_n, DV, BDV)
            wait_for_loads(b_v, PRECISION)
            s, visible, slope = scores(b_q, b_k, seq, i_h, row, first, coverage, o, True, PRECISION)
            w, ds = score_gradients(
                b_v, b_do, high, low, delta, g,
                seq, i_h, row, first, s, visible, o, BM, BN, PRECISION,
            )  # fmt: skip
            if o.excludes is not None:  # 0 * NaN would be NaN
                m_n = m_n & any_query_sees(visible)
                b_k = load_rows(k, seq.k_base, i_h // o.group, o_n, m_n, D, BD)
            acc = tl.dot((ds * slope).to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    store_rows(grad_q, seq.q_base, i_h, o_m, m_m, acc * o.scale, D, BD)


@triton.jit
def attention_backward_key_value(
    q,
    k,
    v,
    g,
    o,
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
    seq, i_hkv, tile = locate(o, True, BN)
    first = tile * BN
    if first >= seq.k_len:
        return
    o_n = first + tl.arange(0, BN)
    m_n = o_n < seq.k_len
    b_k = load_rows(k, seq.k_base, i_hkv, o_n, m_n, D, BD)
    b_v = load_rows(v, seq.k_base, i_hkv, o_n, m_n, DV, BDV)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BDV], tl.float32)

    last = tl.minimum(first + BN, seq.k_len) - 1
    lo, hi = visible_queries(first, last, seq, o, BM)
    for i_h in range(i_hkv * o.group, i_hkv * o.group + o.group):
        o_head = first_row(o, seq, i_h)
        for row in range(lo, hi, BM):
            coverage = tile_coverage(seq, i_h, row, first, o, BM, BN)
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
                    b_q, b_k, seq, i_h, row, first, coverage, o, True, PRECISION
                )
                w, ds = score_gradients(
                    b_v, b_do, high, low, delta, g,
                    seq, i_h, row, first, s, visible, o, BM, BN, PRECISION,
                )  # fmt: skip
                acc_v = tl.dot(tl.trans(w.to(b_do.dtype)), b_do, acc_v, input_precision=PRECISION)
                ds = (ds * slope).to(b_q.dtype)
                acc_k = tl.dot(tl.trans(ds), b_q, acc_k, input_precision=PRECISION)
    if o.p_seed is not None:
        acc_v = acc_v * o.kept_scale
    store_rows(grad_k, seq.k_base, i_hkv, o_n, m_n, acc_k * o.scale, D, BD)
    store_rows(grad_v, seq.k_base, i_hkv, o_n, m_n, acc_v, DV, BDV)
