"""The kernels of memory hops: u <- phi(H_k u + C_k^T softmax(scale M_k u + bias_k)), k = 1 ... K.

A program computes all hops of a tile of queries in one launch. With a projection it computes one
hop, and H_k u_k comes from PyTorch's matrix product. Queries are rows r = b * Q + q. A group of
them shares a memory: the queries of a sequence, or all queries.

Hopfield retrieval is memory hops without the old state, u <- C^T softmax(scale M u + bias), where
each query takes its own number of hops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    INF,
    LOG2E,
    Operand,
    any_query_sees,
    load_rows,
    row_tile,
    start_softmax,
    tanh,
    update_softmax,
    wait_for_loads,
)


class Hops(NamedTuple):
    """The operands and sizes of a call. Memories are [B, K, N, D], masks [B, Q, K, N]."""

    m: Operand  # input memories M_k
    c: Operand  # output memories C_k
    bool_mask: Operand | None
    added_mask: Operand | None
    grad_weights: Operand | None
    queries: int  # of a sequence
    group: int  # rows that share a memory
    rows: int  # of a memory
    hops: int
    scale: float
    rescored: int  # 1: scores have the unit of the definition
    p_steps: Any = None  # [B, Q] int64, retrieval only: the number of hops of each query


@triton.jit
def _rows_of(i_group, begin, call, BM: tl.constexpr):
    """The queries of the tile that begins at query ``begin`` of a group, and which ones exist."""
    o_local = begin + tl.arange(0, BM)
    return tl.cast(i_group, tl.int64) * call.group + o_local, o_local < call.group


@triton.jit
def _load_state(p_x, row, m_r, D: tl.constexpr, BD: tl.constexpr):
    """Rows ``row`` [BM] of a contiguous float32 buffer [..., D], as [BM, BD]."""
    o_d = tl.arange(0, BD)
    p_x = p_x + row[:, None] * D + o_d[None, :]
    return tl.load(p_x, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _store_state(p_x, row, m_r, block, D: tl.constexpr, BD: tl.constexpr):
    """Write ``block`` [BM, BD] to the rows ``row`` [BM] of a contiguous buffer [..., D]."""
    o_d = tl.arange(0, BD)
    p_x = p_x + row[:, None] * D + o_d[None, :]
    tl.store(p_x, block.to(p_x.dtype.element_ty), mask=m_r[:, None] & (o_d < D)[None, :])


@triton.jit
def _load_vectors(x, o_r, m_r, call, D: tl.constexpr, BD: tl.constexpr):
    """Queries ``o_r`` of an operand [B, Q, -, D], as float32 [BM, BD]."""
    o_d = tl.arange(0, BD)
    p_x = x.p + ((o_r // call.queries) * x.b + (o_r % call.queries) * x.h)[:, None]
    p_x = p_x + o_d.to(tl.int64)[None, :] * x.d
    return tl.load(p_x, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_tile(x, o_r, hop, o_n, inside, other, call):
    """The tile [BM, BN] of an operand [B, Q, K, N]: queries ``o_r`` and memory rows ``o_n``."""
    p_x = x.p + (o_r // call.queries) * x.b + (o_r % call.queries) * x.h + hop * x.l
    return tl.load(p_x[:, None] + o_n.to(tl.int64)[None, :] * x.d, mask=inside, other=other)


@triton.jit
def _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION: tl.constexpr):
    """Return the scores [BM, BN], and which pairs of a query and a memory row are visible."""
    s = tl.dot(b_u.to(b_m.dtype), tl.trans(b_m), input_precision=PRECISION) * call.scale
    visible = m_r[:, None] & (o_n < call.rows)[None, :]
    if call.bool_mask is not None:
        visible = visible & (_load_tile(call.bool_mask, o_r, hop, o_n, visible, 0, call) != 0)
    if call.added_mask is not None:
        added_mask = _load_tile(call.added_mask, o_r, hop, o_n, visible, -INF, call).to(tl.float32)
        visible = visible & (added_mask != -INF)
        s = s + tl.where(visible, added_mask, 0.0)
    return s, visible


@triton.jit
def _weights(s, visible, m, l, NORMALIZE: tl.constexpr):
    """The weights p [BM, BN] of the scores, 0 where excluded."""
    if NORMALIZE:
        return tl.where(visible, tl.exp2((s - m[:, None]) * LOG2E) / l[:, None], 0.0)
    else:
        return tl.where(visible, s, 0.0)


@triton.jit
def hops_forward(
    query,  # [B, Q, D] as [B, Q, -, D]; None: the state of the first hop is in the trace
    call,
    p_trace,  # [B, Q, 2K + 1, D] float32: u_1, o_1, u_2, ..., u_K+1
    p_stats,  # [B, Q, K, 2] float32: m and l of p = exp(s - m) / l
    weights,  # [B, Q, K, N] or None
    p_out,  # [B, Q, D]
    p_projected,  # [B, Q, D] float32: H_k u_k of the only hop, or None
    first_hop,
    last_hop,
    ACTIVATION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """All hops from ``first_hop`` to ``last_hop`` for one tile of queries."""
    i_group, begin = row_tile(call.group, BM)
    o_r, m_r = _rows_of(i_group, begin, call, BM)
    row = o_r * (2 * call.hops + 1)
    if query is None:
        b_u = _load_state(p_trace, row + 2 * first_hop, m_r, D, BD)
    else:
        b_u = _load_vectors(query, o_r, m_r, call, D, BD)
        _store_state(p_trace, row, m_r, b_u, D, BD)

    for hop in range(first_hop, last_hop + 1):
        m, l, acc = start_softmax(BM, BD)
        for col in range(0, call.rows, BN):
            o_n = col + tl.arange(0, BN)
            b_m = load_rows(call.m, i_group, hop, o_n, o_n < call.rows, D, BD)
            s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
            if NORMALIZE:
                m, l, p, shrink = update_softmax(m, l, tl.where(visible, s, -INF), LOG2E, call)
                acc = acc * shrink[:, None]
            else:
                p = tl.where(visible, s, 0.0)
            m_n = (o_n < call.rows) & any_query_sees(visible)  # 0 * NaN would be NaN
            b_c = load_rows(call.c, i_group, hop, o_n, m_n, D, BD)
            acc = tl.dot(p.to(b_c.dtype), b_c, acc, input_precision=PRECISION)
        l_safe = tl.where(l == 0.0, 1.0, l)
        m_safe = tl.where(m == -INF, 0.0, m)
        if NORMALIZE:
            acc = acc / l_safe[:, None]
        if weights is not None:
            for col in range(0, call.rows, BN):
                o_n = col + tl.arange(0, BN)
                b_m = load_rows(call.m, i_group, hop, o_n, o_n < call.rows, D, BD)
                s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
                p = _weights(s, visible, m_safe, l_safe, NORMALIZE)
                p_w = weights.p + (o_r * call.hops + hop)[:, None] * call.rows + o_n[None, :]
                inside = m_r[:, None] & (o_n < call.rows)[None, :]
                tl.store(p_w, p.to(weights.p.dtype.element_ty), mask=inside)
        o_stats = (o_r * call.hops + hop) * 2
        tl.store(p_stats + o_stats, m if NORMALIZE else m_safe, mask=m_r)
        tl.store(p_stats + o_stats + 1, l_safe, mask=m_r)
        _store_state(p_trace, row + 2 * hop + 1, m_r, acc, D, BD)

        if call.p_steps is not None:
            moves = hop < tl.load(call.p_steps + o_r, mask=m_r, other=0)
            b_u = tl.where(moves[:, None], acc, b_u)
        else:
            if p_projected is not None:
                b_u = _load_state(p_projected, o_r, m_r, D, BD)
            b_u = b_u + acc
        if ACTIVATION == "relu":
            b_u = tl.where(b_u < 0.0, 0.0, b_u)  # NaN stays NaN
        if ACTIVATION == "tanh":
            b_u = tanh(b_u)
        if ACTIVATION == "sigmoid":
            b_u = 1.0 / (1.0 + tl.exp2(b_u * -LOG2E))
        _store_state(p_trace, row + 2 * hop + 2, m_r, b_u, D, BD)
    _store_state(p_out, o_r, m_r, b_u, D, BD)


@triton.jit
def _load_softmax_state(p_stats, o_r, m_r, hop, call):
    """m and l of each query; m is +inf for a fully masked query, so that its p is 0."""
    o_stats = (o_r * call.hops + hop) * 2
    m = tl.load(p_stats + o_stats, mask=m_r, other=-INF)
    l = tl.load(p_stats + o_stats + 1, mask=m_r, other=1.0)
    return tl.where(m == -INF, INF, m), l


@triton.jit
def _weight_gradients(b_g, b_c, o_r, hop, o_n, visible, call, PRECISION: tl.constexpr):
    """d loss / d p [BM, BN]."""
    dp = tl.dot(b_g.to(b_c.dtype), tl.trans(b_c), input_precision=PRECISION)
    if call.grad_weights is not None:
        dp += _load_tile(call.grad_weights, o_r, hop, o_n, visible, 0.0, call).to(tl.float32)
    return dp


@triton.jit
def _score_gradients(p, dp, delta, visible, NORMALIZE: tl.constexpr):
    """d loss / d s [BM, BN]."""
    if NORMALIZE:
        return tl.where(visible, p * (dp - delta[:, None]), 0.0)
    else:
        return tl.where(visible, dp, 0.0)


@triton.jit
def hops_backward_query(
    grad_out,  # [B, Q, D] as [B, Q, -, D], or None
    call,
    p_trace,
    p_stats,
    p_grads,  # [B, Q, K, D] float32: d loss / d (H_k u_k + o_k)
    p_delta,  # [B, Q, K] float32: sum_i p_i dp_i
    p_grad_scores,  # [B, Q, K, N] float32: d loss / d s, or None
    p_grad_query,  # [B, Q, D]
    first_hop,
    last_hop,
    PROJECTED: tl.constexpr,  # the host adds H_k^T times the gradient of H_k u_k + o_k
    ACTIVATION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradient of one tile of queries, from ``last_hop`` down to ``first_hop``."""
    # In float32 both memories are loaded before any wait; otherwise the waits cost registers.
    EARLY: tl.constexpr = call.c.p.dtype.element_ty == tl.float32
    i_group, begin = row_tile(call.group, BM)
    o_r, m_r = _rows_of(i_group, begin, call, BM)
    row = o_r * (2 * call.hops + 1)
    b_g = tl.zeros([BM, BD], tl.float32)
    if grad_out is not None:
        b_g = _load_vectors(grad_out, o_r, m_r, call, D, BD)

    for step in range(last_hop - first_hop + 1):
        hop = last_hop - step
        if ACTIVATION != "none":
            b_y = _load_state(p_trace, row + 2 * hop + 2, m_r, D, BD)
            if ACTIVATION == "relu":
                b_g = tl.where(b_y > 0.0, b_g, 0.0)
            if ACTIVATION == "tanh":
                b_g = b_g * (1.0 - b_y * b_y)
            if ACTIVATION == "sigmoid":
                b_g = b_g * b_y * (1.0 - b_y)
        b_kept = b_g
        if call.p_steps is not None:
            moves = hop < tl.load(call.p_steps + o_r, mask=m_r, other=0)
            b_kept = tl.where(moves[:, None], 0.0, b_g)
            b_g = tl.where(moves[:, None], b_g, 0.0)
        _store_state(p_grads, o_r * call.hops + hop, m_r, b_g, D, BD)
        b_u = _load_state(p_trace, row + 2 * hop, m_r, D, BD)
        m, l = _load_softmax_state(p_stats, o_r, m_r, hop, call)
        delta = tl.zeros([BM], tl.float32)
        if NORMALIZE:
            for col in range(0, call.rows, BN):
                o_n = col + tl.arange(0, BN)
                b_m = load_rows(call.m, i_group, hop, o_n, o_n < call.rows, D, BD)
                if EARLY:
                    b_c = load_rows(call.c, i_group, hop, o_n, o_n < call.rows, D, BD)
                    wait_for_loads(b_c, PRECISION)
                s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
                if not EARLY:
                    b_c = load_rows(call.c, i_group, hop, o_n, o_n < call.rows, D, BD)
                dp = _weight_gradients(b_g, b_c, o_r, hop, o_n, visible, call, PRECISION)
                p = _weights(s, visible, m, l, True)
                delta += tl.sum(tl.where(visible, p * dp, 0.0), axis=1)
            tl.store(p_delta + o_r * call.hops + hop, delta, mask=m_r)

        acc = tl.zeros([BM, BD], tl.float32)
        for col in range(0, call.rows, BN):
            o_n = col + tl.arange(0, BN)
            b_m = load_rows(call.m, i_group, hop, o_n, o_n < call.rows, D, BD)
            if EARLY:
                b_c = load_rows(call.c, i_group, hop, o_n, o_n < call.rows, D, BD)
                wait_for_loads(b_c, PRECISION)
            s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
            if not EARLY:
                b_c = load_rows(call.c, i_group, hop, o_n, o_n < call.rows, D, BD)
            dp = _weight_gradients(b_g, b_c, o_r, hop, o_n, visible, call, PRECISION)
            p = _weights(s, visible, m, l, NORMALIZE)
            ds = _score_gradients(p, dp, delta, visible & (m != INF)[:, None], NORMALIZE)
            if p_grad_scores is not None:
                p_s = p_grad_scores + (o_r * call.hops + hop)[:, None] * call.rows + o_n[None, :]
                tl.store(p_s, ds, mask=m_r[:, None] & (o_n < call.rows)[None, :])
            m_n = (o_n < call.rows) & any_query_sees(visible)  # 0 * NaN would be NaN
            b_m = load_rows(call.m, i_group, hop, o_n, m_n, D, BD)
            acc = tl.dot(ds.to(b_m.dtype), b_m, acc, input_precision=PRECISION)
        if PROJECTED:
            b_g = tl.zeros([BM, BD], tl.float32)
        if call.p_steps is not None:
            b_g = b_kept
        b_g = b_g + acc * call.scale
    _store_state(p_grad_query, o_r, m_r, b_g, D, BD)


@triton.jit
def hops_backward_memory(
    call,
    p_trace,
    p_stats,
    p_grads,
    p_delta,
    p_grad_memory,  # [groups or 1, slots, N, D]
    groups,
    slots,  # memories of a stack; 1 for a single memory
    first_out_slot,  # the slot of the first hop's output memory
    IS_INPUT: tl.constexpr,  # the slots are input memories
    IS_OUTPUT: tl.constexpr,  # the slots are output memories
    SUMMED: tl.constexpr,  # all groups share the slot
    NORMALIZE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradient of one tile of rows of a memory: dM = scale ds^T u, dC = p^T g, hop by hop."""
    i_slot, col = row_tile(call.rows, BN)
    slot = (i_slot % slots).to(tl.int32)
    i_memory = i_slot // slots
    o_n = col + tl.arange(0, BN)
    m_n = o_n < call.rows
    begin = i_memory
    end = i_memory + 1
    if SUMMED:
        begin = i_memory * 0
        end = begin + groups
    acc = tl.zeros([BN, BD], tl.float32)
    for i_group in range(begin, end):
        if IS_INPUT:
            from_hop = tl.where(slots > 1, slot, 0)
            to_hop = tl.where(slots > 1, tl.minimum(slot + 1, call.hops), call.hops)
            for hop in range(from_hop, to_hop):
                b_m = load_rows(call.m, i_group, hop, o_n, m_n, D, BD)
                b_c = load_rows(call.c, i_group, hop, o_n, m_n, D, BD)
                for tile in range(tl.cdiv(call.group, BM)):
                    o_r, m_r = _rows_of(i_group, tile * BM, call, BM)
                    b_u = _load_state(p_trace, o_r * (2 * call.hops + 1) + 2 * hop, m_r, D, BD)
                    b_g = _load_state(p_grads, o_r * call.hops + hop, m_r, D, BD)
                    m, l = _load_softmax_state(p_stats, o_r, m_r, hop, call)
                    delta = tl.load(p_delta + o_r * call.hops + hop, mask=m_r, other=0.0)
                    s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
                    dp = _weight_gradients(b_g, b_c, o_r, hop, o_n, visible, call, PRECISION)
                    p = _weights(s, visible, m, l, NORMALIZE)
                    visible = visible & (m != INF)[:, None]
                    ds = _score_gradients(p, dp, delta, visible, NORMALIZE) * call.scale
                    acc = tl.dot(
                        tl.trans(ds.to(b_m.dtype)), b_u.to(b_m.dtype), acc,
                        input_precision=PRECISION,
                    )  # fmt: skip
        if IS_OUTPUT:
            from_hop = tl.where(slots > 1, tl.maximum(slot - first_out_slot, 0), 0)
            to_hop = tl.where(
                slots > 1, tl.minimum(slot - first_out_slot + 1, call.hops), call.hops
            )
            for hop in range(from_hop, to_hop):
                b_m = load_rows(call.m, i_group, hop, o_n, m_n, D, BD)
                for tile in range(tl.cdiv(call.group, BM)):
                    o_r, m_r = _rows_of(i_group, tile * BM, call, BM)
                    b_u = _load_state(p_trace, o_r * (2 * call.hops + 1) + 2 * hop, m_r, D, BD)
                    b_g = _load_state(p_grads, o_r * call.hops + hop, m_r, D, BD)
                    m, l = _load_softmax_state(p_stats, o_r, m_r, hop, call)
                    s, visible = _scores(b_u, b_m, o_r, m_r, hop, o_n, call, PRECISION)
                    p = _weights(s, visible, m, l, NORMALIZE)
                    acc = tl.dot(
                        tl.trans(p.to(b_m.dtype)), b_g.to(b_m.dtype), acc,
                        input_precision=PRECISION,
                    )  # fmt: skip
    o_d = tl.arange(0, BD)
    o_out = (i_slot * call.rows + o_n)[:, None] * D + o_d[None, :]
    acc = acc.to(p_grad_memory.dtype.element_ty)
    tl.store(p_grad_memory + o_out, acc, mask=m_n[:, None] & (o_d < D)[None, :])


@triton.jit
def retrieve(
    state,  # [G, Q, D] as [G, Q, -, D]; None: the state is in p_ends
    call,
    p_out,  # [G, Q, D]
    p_ends,  # [G, Q, 2, D] float32: the state before the last step, and after it
    p_steps,  # [G, Q] int64: steps taken; negative if not converged
    first_step,  # steps already taken by earlier launches
    steps_max,
    eps_squared,
    rounding_squared,  # the square of the relative rounding error of a step
    together,  # this many queries stop together, at most BM
    D: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Step until every query of the tile has converged or has taken ``steps_max`` steps."""
    of_tile = BM // together * together
    i_group, begin = row_tile(call.group, of_tile)
    o_i = tl.arange(0, BM)
    o_local = begin + o_i
    m_r = (o_i < of_tile) & (o_local < call.group)
    o_r = i_group * call.group + o_local
    moving = m_r.to(tl.int32)
    steps = tl.zeros([BM], tl.int64)
    if state is None:
        b_x = _load_state(p_ends, o_r * 2 + 1, m_r, D, BD)
        steps = tl.load(p_steps + o_r, mask=m_r, other=0)
        moving = (steps < 0).to(tl.int32)
    else:
        b_x = _load_vectors(state, o_r, m_r, call, D, BD)
        _store_state(p_ends, o_r * 2, m_r, b_x, D, BD)
    # Which queries of the tile stop together.
    stops_together = (o_i // together)[:, None] == (o_i // together)[None, :]

    step = tl.program_id(0) * 0 + first_step
    while (step < steps_max) & (tl.max(moving, axis=0) > 0):
        step += 1
        m, l, acc = start_softmax(BM, BD)
        for col in range(0, call.rows, BN):
            o_n = col + tl.arange(0, BN)
            b_m = load_rows(call.m, i_group, 0, o_n, o_n < call.rows, D, BD)
            s, visible = _scores(b_x, b_m, o_r, m_r, 0, o_n, call, PRECISION)
            m, l, p, shrink = update_softmax(m, l, tl.where(visible, s, -INF), LOG2E, call)
            m_n = (o_n < call.rows) & any_query_sees(visible)
            b_c = load_rows(call.c, i_group, 0, o_n, m_n, D, BD)
            acc = tl.dot(p.to(b_c.dtype), b_c, acc * shrink[:, None], input_precision=PRECISION)
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]

        moved_squared = (acc - b_x).to(tl.float64)
        moved_squared = tl.sum(moved_squared * moved_squared, axis=1)
        length_squared = acc.to(tl.float64)
        length_squared = tl.sum(length_squared * length_squared, axis=1)
        moved_squared = tl.sum(
            tl.where(stops_together & m_r[None, :], moved_squared[None, :], 0.0), axis=1
        )
        length_squared = tl.sum(
            tl.where(stops_together & m_r[None, :], length_squared[None, :], 0.0), axis=1
        )
        not_at_rest = moved_squared > tl.maximum(rounding_squared * length_squared, eps_squared)
        active = moving > 0
        _store_state(p_ends, o_r * 2, m_r & active, b_x, D, BD)
        b_x = tl.where(active[:, None], acc, b_x)
        steps = tl.where(active, tl.where(not_at_rest, -step, step).to(tl.int64), steps)
        moving = (active & not_at_rest).to(tl.int32)
    _store_state(p_ends, o_r * 2 + 1, m_r, b_x, D, BD)
    _store_state(p_out, o_r, m_r, b_x, D, BD)
    tl.store(p_steps + o_r, steps, mask=m_r)
