"""The kernels of additive attention: e_ij = sum_a v_a tanh(q_ia + k_ja + bias_a).

Queries and keys are float32 [B, A, L], so that a column of a tile is contiguous in memory. The
forward pass stores no tensor of size Tq x Tk. The backward pass stores two, the scores and their
gradients, and none of size Tq x Tk x A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    INF,
    LOG2E,
    any_query_sees,
    batch_sequence,
    dropout_keep,
    in_matrix,
    in_window,
    load_matrix_tile,
    load_rows,
    matrix_tile,
    row_tile,
    start_softmax,
    store_rows,
    tanh,
    update_softmax,
    visible_keys,
    wait_for_loads,
)


class ScoreOperands(NamedTuple):
    """The float32 operands of the scores."""

    p_q: Any  # [B, A, Tq]
    p_k: Any  # [B, A, Tk]
    p_v: Any  # [A]
    p_bias: Any  # [A] or None


@triton.jit
def _preactivation(b_q, b_k, operands, a):
    """q + k + bias [BM, BN] of column a; q + k first, so that large q and k cancel exactly."""
    total = b_q[:, None] + b_k[None, :]
    return total if operands.p_bias is None else total + tl.load(operands.p_bias + a)


@triton.jit
def _scores(operands, seq, row, col, width, opt, BM: tl.constexpr, BN: tl.constexpr):
    """Return the scores e [BM, BN], -inf where excluded, and which pairs are visible."""
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    p_q = operands.p_q + seq.i_b * width * opt.q_len
    p_k = operands.p_k + seq.i_b * width * opt.k_len
    e = tl.zeros([BM, BN], tl.float32)
    for a in range(width):
        b_q = tl.load(p_q + a * opt.q_len + o_m, mask=o_m < opt.q_len, other=0.0)
        b_k = tl.load(p_k + a * opt.k_len + o_n, mask=o_n < opt.k_len, other=0.0)
        e += tl.load(operands.p_v + a) * tanh(_preactivation(b_q, b_k, operands, a))
    visible = in_window(o_m, o_n, seq, opt)
    if opt.bool_mask is not None:
        visible = visible & (load_matrix_tile(opt.bool_mask, seq, 0, row, col, 0, BM, BN) != 0)
    if opt.added_mask is not None:
        added_mask = load_matrix_tile(opt.added_mask, seq, 0, row, col, -INF, BM, BN).to(tl.float32)
        visible = visible & (added_mask != -INF)
        e = e + added_mask
    return tl.where(visible, e, -INF), visible


@triton.jit
def additive_forward(
    operands,
    value,  # [B, 1, Tk, Dv]
    opt,
    out,  # [B, 1, Tq, Dv]
    weights,  # [B, 1, Tq, Tk] or None
    width,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out = softmax(e) @ value for one tile of queries, and the weights softmax(e) if requested."""
    i_b, row = row_tile(opt.q_len, BM)
    seq = batch_sequence(opt, i_b)
    o_m = row + tl.arange(0, BM)
    m_m = o_m < opt.q_len
    m, l, acc = start_softmax(BM, BDV)
    last = tl.minimum(row + BM, opt.q_len) - 1
    lo, full_lo, full_hi, hi = visible_keys(row, last, seq, opt, BN)
    for col in range(0, hi, BN):
        o_n = col + tl.arange(0, BN)
        e, visible = _scores(operands, seq, row, col, width, opt, BM, BN)
        m, l, p, shrink = update_softmax(m, l, e, LOG2E, opt)
        if opt.p_seed is not None:
            p = tl.where(dropout_keep(seq, 0, o_m, col, opt, BM, BN), p, 0.0)
        b_v = load_rows(value, i_b, 0, o_n, (o_n < hi) & any_query_sees(visible), DV, BDV)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision=PRECISION)
    share = 1.0 / tl.where(l == 0.0, 1.0, l)
    if opt.p_seed is not None:
        share = share * opt.kept_scale
    store_rows(out, i_b, 0, o_m, m_m, acc * share[:, None], DV, BDV)

    if weights is not None:
        top = tl.where(m == -INF, 0.0, m)
        for col in range(0, opt.k_len, BN):
            o_n = col + tl.arange(0, BN)
            e, visible = _scores(operands, seq, row, col, width, opt, BM, BN)
            w = tl.exp2((e - top[:, None]) * LOG2E) * share[:, None]
            if opt.p_seed is not None:
                w = tl.where(dropout_keep(seq, 0, o_m, col, opt, BM, BN), w, 0.0)
            p_w = weights.p + i_b * weights.b + o_m.to(tl.int64)[:, None] * weights.l
            p_w = p_w + o_n[None, :]
            tl.store(p_w, w.to(weights.p.dtype.element_ty), mask=in_matrix(o_m, o_n, opt))


@triton.jit
def additive_scores(
    operands,
    opt,
    p_scores,  # [B, Tq, Tk] float32
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store the scores of one tile of queries and keys, -inf where excluded."""
    i_b, row, col = matrix_tile(opt.q_len, opt.k_len, BM, BN)
    seq = batch_sequence(opt, i_b)
    e, _ = _scores(operands, seq, row, col, width, opt, BM, BN)
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    p_e = p_scores + (i_b * opt.q_len + o_m[:, None]) * opt.k_len + o_n[None, :]
    tl.store(p_e, e, mask=in_matrix(o_m, o_n, opt))


@triton.jit
def _load_contiguous_tile(p_x, i_b, row, col, opt, other, BM: tl.constexpr, BN: tl.constexpr):
    """The tile [BM, BN] at (row, col) of a contiguous [B, Tq, Tk]; ``other`` outside of it."""
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    p_x = p_x + (i_b * opt.q_len + o_m[:, None]) * opt.k_len + o_n[None, :]
    return tl.load(p_x, mask=in_matrix(o_m, o_n, opt), other=other)


@triton.jit
def _weight_gradients(
    b_do,  # [BM, BDV]
    b_v,  # [BN, BDV]
    grad_weights,
    seq,
    row,
    col,
    opt,
    visible,  # [BM, BN]
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d softmax(e) [BM, BN], 0 where excluded."""
    wait_for_loads(b_v, PRECISION)
    dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if grad_weights is not None:
        dp += load_matrix_tile(grad_weights, seq, 0, row, col, 0.0, BM, BN).to(tl.float32)
    if opt.p_seed is not None:
        keep = dropout_keep(seq, 0, row + tl.arange(0, BM), col, opt, BM, BN)
        dp = tl.where(keep, dp * opt.kept_scale, 0.0)
    return tl.where(visible, dp, 0.0)


@triton.jit
def additive_backward_scores(
    p_scores,  # [B, Tq, Tk] float32
    value,  # [B, 1, Tk, Dv]
    grad_out,  # [B, 1, Tq, Dv]
    grad_weights,  # [B, 1, Tq, Tk] or None
    opt,
    p_top,  # [B, Tq] float32: the maximum of each row, +inf for a fully masked row
    p_sum,  # [B, Tq] float32: the sum of exp(e - maximum)
    p_grad,  # [B, Tq, Tk] float32
    DV: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d e = p (dp - delta) for one tile of queries, with delta = sum_j p dp.

    Also stores ``p_top`` and ``p_sum``. delta is summed in two passes, the second of which adds the
    remainder sum_j p (dp - delta), so that the gradients of a row sum to 0 up to rounding.
    """
    i_b, row = row_tile(opt.q_len, BM)
    seq = batch_sequence(opt, i_b)
    o_m = row + tl.arange(0, BM)
    m_m = o_m < opt.q_len
    m = tl.full([BM], -INF, tl.float32)
    l = tl.zeros([BM], tl.float32)
    for col in range(0, opt.k_len, BN):
        e = _load_contiguous_tile(p_scores, i_b, row, col, opt, -INF, BM, BN)
        m, l, p, shrink = update_softmax(m, l, e, LOG2E, opt)
    l = tl.where(l == 0.0, 1.0, l)
    top = tl.where(m == -INF, INF, m)
    tl.store(p_top + i_b * opt.q_len + o_m, top, mask=m_m)
    tl.store(p_sum + i_b * opt.q_len + o_m, l, mask=m_m)

    b_do = load_rows(grad_out, i_b, 0, o_m, m_m & (top != INF), DV, BDV)
    delta = tl.zeros([BM], tl.float32)
    for _ in range(2):
        correction = tl.zeros([BM], tl.float32)
        for col in range(0, opt.k_len, BN):
            o_n = col + tl.arange(0, BN)
            e = _load_contiguous_tile(p_scores, i_b, row, col, opt, -INF, BM, BN)
            p = tl.exp2((e - top[:, None]) * LOG2E) / l[:, None]
            b_v = load_rows(value, i_b, 0, o_n, o_n < opt.k_len, DV, BDV)
            dp = _weight_gradients(
                b_do, b_v, grad_weights, seq, row, col, opt, e != -INF, PRECISION, BM, BN
            )
            correction += tl.sum(tl.where(e != -INF, p * (dp - delta[:, None]), 0.0), axis=1)
        delta += correction
    for col in range(0, opt.k_len, BN):
        o_n = col + tl.arange(0, BN)
        e = _load_contiguous_tile(p_scores, i_b, row, col, opt, -INF, BM, BN)
        p = tl.exp2((e - top[:, None]) * LOG2E) / l[:, None]
        b_v = load_rows(value, i_b, 0, o_n, o_n < opt.k_len, DV, BDV)
        dp = _weight_gradients(
            b_do, b_v, grad_weights, seq, row, col, opt, e != -INF, PRECISION, BM, BN
        )
        de = tl.where(e != -INF, p * (dp - delta[:, None]), 0.0)
        p_g = p_grad + (i_b * opt.q_len + o_m[:, None]) * opt.k_len + o_n[None, :]
        tl.store(p_g, de, mask=in_matrix(o_m, o_n, opt))


@triton.jit
def additive_backward_value(
    p_scores,
    p_top,
    p_sum,
    grad_out,
    opt,
    grad_value,  # [B, 1, Tk, Dv]
    DV: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d value = w.T @ do for one tile of keys."""
    i_b, col = row_tile(opt.k_len, BN)
    seq = batch_sequence(opt, i_b)
    o_n = col + tl.arange(0, BN)
    acc = tl.zeros([BN, BDV], tl.float32)
    for row in range(0, opt.q_len, BM):
        o_m = row + tl.arange(0, BM)
        m_m = o_m < opt.q_len
        top = tl.load(p_top + i_b * opt.q_len + o_m, mask=m_m, other=INF)
        l = tl.load(p_sum + i_b * opt.q_len + o_m, mask=m_m, other=1.0)
        e = _load_contiguous_tile(p_scores, i_b, row, col, opt, -INF, BM, BN)
        w = tl.exp2((e - top[:, None]) * LOG2E) / l[:, None]
        if opt.p_seed is not None:
            w = tl.where(dropout_keep(seq, 0, o_m, col, opt, BM, BN), w * opt.kept_scale, 0.0)
        b_do = load_rows(grad_out, i_b, 0, o_m, m_m & (top != INF), DV, BDV)
        acc = tl.dot(tl.trans(w.to(b_do.dtype)), b_do, acc, input_precision=PRECISION)
    store_rows(grad_value, i_b, 0, o_n, o_n < opt.k_len, acc, DV, BDV)


@triton.jit
def additive_backward_column(
    operands,
    p_grad,  # [B, Tq, Tk] float32, d loss / d e
    opt,
    p_grad_x,  # [B, A, Tq] or [B, A, Tk] float32
    p_grad_v,  # [B, A, tiles] float32, or None for the keys
    width,
    OF_KEYS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Column a of the gradient of one tile of queries or keys, and its part of the gradient of v_a.

    With t = tanh(q_a + k_a + bias_a): dq_a = v_a sum_j de (1 - t^2), dk_a = v_a sum_i de (1 - t^2),
    dv_a = sum_ij de t.
    """
    q_tiles = tl.cdiv(opt.q_len, BM)
    k_tiles = tl.cdiv(opt.k_len, BN)
    tiles = k_tiles if OF_KEYS else q_tiles
    tile = tl.program_id(0) % tiles
    i_ba = (tl.program_id(0) // tiles).to(tl.int64)
    i_b = i_ba // width
    v_a = tl.load(operands.p_v + i_ba % width)
    total = tl.zeros([BN if OF_KEYS else BM], tl.float32)
    total_v = tl.zeros([BM], tl.float32)
    for step in range(q_tiles if OF_KEYS else k_tiles):
        row = (step if OF_KEYS else tile) * BM
        col = (tile if OF_KEYS else step) * BN
        o_m = row + tl.arange(0, BM)
        o_n = col + tl.arange(0, BN)
        b_q = tl.load(operands.p_q + i_ba * opt.q_len + o_m, mask=o_m < opt.q_len, other=0.0)
        b_k = tl.load(operands.p_k + i_ba * opt.k_len + o_n, mask=o_n < opt.k_len, other=0.0)
        de = _load_contiguous_tile(p_grad, i_b, row, col, opt, 0.0, BM, BN)
        t = tanh(_preactivation(b_q, b_k, operands, i_ba % width))
        # Selected: t may be NaN in excluded pairs.
        dx = tl.where(de != 0.0, de * (1.0 - t * t), 0.0)
        total += tl.sum(dx, axis=0 if OF_KEYS else 1)
        if p_grad_v is not None:
            total_v += tl.sum(tl.where(de != 0.0, de * t, 0.0), axis=1)
    if OF_KEYS:
        o_n = tile * BN + tl.arange(0, BN)
        tl.store(p_grad_x + i_ba * opt.k_len + o_n, v_a * total, mask=o_n < opt.k_len)
    else:
        o_m = tile * BM + tl.arange(0, BM)
        tl.store(p_grad_x + i_ba * opt.q_len + o_m, v_a * total, mask=o_m < opt.q_len)
    if p_grad_v is not None:
        tl.store(p_grad_v + i_ba * tiles + tile, tl.sum(total_v, axis=0))
