"""Building blocks of the attention kernels: operands, visibility, scores, online softmax, dropout.

Scores have one of two units. Without an option that changes them they stay the plain q . k, and the
softmax works on s * unit with unit = scale * log2(e), in one multiply-add. Otherwise they are the
scores of ``docs/design.md`` and unit = log2(e). It is applied after the row's maximum is
subtracted, because a mask full of finfo.min would overflow before.

Positions in a sequence are int32, which ``why_not`` ensures; offsets of addresses are int64.

Names in kernels: ``i_`` is an index, ``o_`` the offsets of a tile and ``m_`` which of them exist,
``p_`` a pointer, ``b_`` a block in registers. ``opt`` are the :class:`Options`, ``g`` the
:class:`Gradients`, ``row`` and ``col`` the first query and the first key of a tile [BM, BN]. ``m``,
``l`` and ``acc`` are the state of the online softmax: the maxima, the sums of exponentials and the
sums of weighted values. A pair is a query with a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton._mask_program import program_pairs
from fastattn.backends.triton._relative_bias import load_bias

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Operand(NamedTuple):
    """A tensor [B, H, L, D], or [B, H, Lq, Lk]. A broadcast dimension has stride 0.

    For packed sequences, [T, H, D], b is the stride of a row, like l: it multiplies the number of
    rows before a sequence.
    """

    p: Any
    b: int  # strides, in elements
    h: int
    l: int
    d: int


class Options(NamedTuple):
    """The options of a call. Fields that are None compile to nothing."""

    heads: int
    group: int  # query heads that share a key head
    q_len: int  # packed sequences: the rows of all of them
    k_len: int
    scale: float  # positive
    offset: int | None  # None: the last query is at the last key
    left: int | None  # None: unlimited
    right: int | None
    bool_mask: Operand | None  # the boolean mask
    added_mask: Operand | None  # the additive mask
    alibi: Operand | None  # slopes, of strides b and h
    softcap: float | None
    table: Operand | None  # the relative bias, [B, H, 1, entries]; its entries are contiguous
    middle: int | None  # its entry of distance 0
    p_positions: Any  # [Lk] int32, of its distances; None: 0, 1, 2, ...
    p_program: Any  # [size] int32, the mask program
    excludes: int | None  # 1 if a mask, a mask program or a relative bias may exclude pairs
    rescored: int | None  # 1 if scores are more than scale * q . k: then their unit is LOG2E
    p_seed: Any  # None without dropout
    threshold: int | None  # draws below it are kept
    kept_scale: float | None  # 65536 / threshold
    p_q_starts: Any = None  # [B + 1] int64, for packed sequences
    p_k_starts: Any = None
    batch: int | None = None
    sinks: Operand | None = None  # of strides b and h


class Gradients(NamedTuple):
    """The gradients of the results of a call; None where there is none."""

    out: Operand | None  # [B, Hq, Lq, Dv]; None: only lse is needed
    lse: Operand | None  # [B, Hq, Lq, 1]
    weights: Operand | None  # [B, Hq, Lq, Lk]
    weight_share: float  # 1 / Hq if the weights were averaged, else 1


class Statistics(NamedTuple):
    """The inputs of the backward kernels for each row, [B, Hq, Lq] float32."""

    p_high: Any  # lse, times log2(e) unless the scores are ``rescored``; inf: a fully masked row
    p_low: Any  # lse minus p_high, in the same unit
    p_delta: Any  # delta minus the gradient of lse


class Sequence(NamedTuple):
    """The sequence that a program works on."""

    i_b: Any  # its index
    q_len: Any
    k_len: Any
    offset: Any
    q_base: Any  # the factor of stride b: the index of the sequence, or the rows before it
    k_base: Any


@triton.jit
def batch_sequence(opt, i_b):
    """Sequence i_b of a batch [B, H, L, D], in which all lengths are equal."""
    i_b = tl.cast(i_b, tl.int64)
    offset = 0
    if opt.offset is None:
        offset = opt.k_len - opt.q_len
    else:
        offset = opt.offset
    return Sequence(i_b, opt.q_len, opt.k_len, offset, i_b, i_b)


@triton.jit
def locate(opt, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's sequence, head and tile; the tile may be past the end.

    Packed sequences begin anywhere. The tiles of sequence b begin at start_b // BLOCK + b. So each
    sequence has enough tiles, and the lengths need not be summed. The rows after the last sequence
    form one extra sequence: its queries are fully masked, and no query can see its keys.
    """
    if opt.p_q_starts is None:
        heads = opt.heads // opt.group if OF_KEYS else opt.heads
        tiles = tl.cdiv(opt.k_len if OF_KEYS else opt.q_len, BLOCK)
        i_bh = tl.program_id(0) // tiles
        return batch_sequence(opt, i_bh // heads), i_bh % heads, tl.program_id(0) % tiles
    else:
        p_starts = opt.p_k_starts if OF_KEYS else opt.p_q_starts
        tiles = (opt.k_len if OF_KEYS else opt.q_len) // BLOCK + opt.batch + 1
        n = tl.program_id(0) % tiles
        started = 0
        for b in range(0, opt.batch + 1, 128):
            o_b = b + tl.arange(0, 128)
            starts = tl.load(p_starts + o_b, mask=o_b <= opt.batch, other=2**40)
            started += tl.sum((starts // BLOCK + o_b <= n).to(tl.int32))
        i_b = tl.maximum(started - 1, 0)
        seq = packed_sequence(opt, i_b, OF_KEYS)
        tile = n - i_b - (seq.k_base if OF_KEYS else seq.q_base).to(tl.int32) // BLOCK
        return seq, tl.program_id(0) // tiles, tile


@triton.jit
def row_tile(rows, BLOCK):
    """Return the matrix that this program works on, and the first row of its tile."""
    tiles = tl.cdiv(rows, BLOCK)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK


@triton.jit
def matrix_tile(rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Return the matrix that this program works on, and the first row and column of its tile."""
    column_tiles = tl.cdiv(columns, BN)
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0) // column_tiles
    col = tl.program_id(0) % column_tiles * BN
    return (tile // row_tiles).to(tl.int64), tile % row_tiles * BM, col


@triton.jit
def packed_sequence(opt, i_b, OF_KEYS: tl.constexpr):
    """Packed sequence i_b. Number B has the queries (OF_KEYS: the keys) after the last sequence."""
    q_base, q_len = _extent(opt.p_q_starts, i_b, opt.batch, opt.q_len, not OF_KEYS)
    k_base, k_len = _extent(opt.p_k_starts, i_b, opt.batch, opt.k_len, OF_KEYS)
    offset = 0
    if opt.offset is None:
        offset = k_len - q_len
    else:
        offset = opt.offset
    return Sequence(tl.cast(i_b, tl.int64), q_len, k_len, offset, q_base, k_base)


@triton.jit
def _extent(p_starts, i_b, batch, rows, TO_THE_END: tl.constexpr):
    """The first row and the length of a sequence; number ``batch`` has the rows TO_THE_END."""
    begin = tl.minimum(tl.maximum(tl.load(p_starts + i_b), 0), rows)
    end = tl.load(p_starts + tl.minimum(i_b + 1, batch))
    if TO_THE_END:
        end = tl.where(i_b == batch, rows, end)
    end = tl.minimum(tl.maximum(end, begin), rows)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def first_row(opt, seq, i_h):
    """The first row of a head in lse [B, Hq, Lq], or [Hq, T] for packed sequences."""
    i_row = seq.i_b * 0
    if opt.p_q_starts is None:
        i_row = (seq.i_b * opt.heads + i_h) * opt.q_len
    else:
        i_row = tl.cast(i_h, tl.int64) * opt.q_len + seq.q_base
    return i_row


@triton.jit
def load_statistics(stats, o_rows, m_m):
    """Return lse in two parts, and delta, all [BM]; (inf, 0, 0) where ``m_m`` is False."""
    high = tl.load(stats.p_high + o_rows, mask=m_m, other=INF)
    low = tl.load(stats.p_low + o_rows, mask=m_m, other=0.0)
    return high, low, tl.load(stats.p_delta + o_rows, mask=m_m, other=0.0)


@triton.jit
def load_rows(x, i_b, i_h, o_l, m_l, D: tl.constexpr, BD: tl.constexpr):
    """Rows ``o_l`` of a head as [BL, BD], 0 where ``m_l`` is False and in columns from D on."""
    o_d = tl.arange(0, BD)
    p_x = x.p + i_b * x.b + i_h * x.h
    p_x = p_x + o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    m_x = m_l[:, None]
    if D != BD:
        m_x = m_x & (o_d < D)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(x, i_b, i_h, o_l, m_l, block, D: tl.constexpr, BD: tl.constexpr):
    """Write ``block`` [BL, BD] to the rows ``o_l`` of a head, in the operand's dtype."""
    o_d = tl.arange(0, BD)
    p_x = x.p + i_b * x.b + i_h * x.h
    p_x = p_x + o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    tl.store(p_x, block.to(x.p.dtype.element_ty), mask=m_l[:, None] & (o_d < D)[None, :])


@triton.jit
def load_matrix_tile(x, seq, i_h, row, col, other, BM: tl.constexpr, BN: tl.constexpr):
    """The tile [BM, BN] that begins at (row, col) of a head of an operand [B, H, Lq, Lk].

    Offsets within the tile are int32, which halves the registers; ``matrix_operand`` in
    ``_attend.py`` limits the strides. Elements outside the matrix are ``other``.
    """
    p_x = x.p + seq.i_b * x.b + i_h * x.h
    p_x = p_x + tl.cast(row, tl.int64) * x.l + tl.cast(col, tl.int64) * x.d
    o_x = tl.arange(0, BM)[:, None] * x.l + tl.arange(0, BN)[None, :] * x.d
    inside = in_matrix(row + tl.arange(0, BM), col + tl.arange(0, BN), seq)
    return tl.load(p_x + o_x, mask=inside, other=other)


@triton.jit
def in_matrix(o_m, o_n, seq):
    """Which pairs [BM, BN] exist; the rows and columns that pad a tile do not."""
    return (o_m < seq.q_len)[:, None] & (o_n < seq.k_len)[None, :]


@triton.jit
def tanh(x):
    """x P(x^2) where |x| < 0.625, to keep the relative accuracy of small x; else from e^-2|x|."""
    a = tl.abs(x)
    xx = x * x
    small = xx * -0.00565999533 + 0.0205909947
    small = xx * small - 0.0537210703
    small = xx * small + 0.133311276
    small = xx * small - 0.333332605
    small = xx * small + 1.0
    e = tl.exp2(a * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(a < 0.625, x * small, tl.where(x < 0.0, -large, large))


@triton.jit
def visible_keys(first, last, seq, opt, BN: tl.constexpr):
    """The keys that the window lets the queries first...last see: (lo, full_lo, full_hi, hi).

    Keys of [lo, hi) are visible to at least one query. Keys of [full_lo, full_hi) are visible to
    all of them, so the window and the tail need no check. These two bounds are multiples of BN.
    """
    lo = 0
    full_lo = 0
    hi = seq.k_len
    full = seq.k_len
    if opt.left is not None:  # i + offset - left <= j
        lo = tl.maximum(first + seq.offset - opt.left, 0)
        full_lo = (tl.maximum(last + seq.offset - opt.left, 0) + BN - 1) // BN * BN
    if opt.right is not None:  # j <= i + offset + right
        hi = tl.maximum(tl.minimum(seq.k_len, last + seq.offset + opt.right + 1), 0)
        full = tl.maximum(tl.minimum(seq.k_len, first + seq.offset + opt.right + 1), 0)
    full_hi = full // BN * BN
    if opt.left is not None:
        full_lo = tl.minimum(full_lo, (hi + BN - 1) // BN * BN)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def visible_queries(first, last, seq, opt, BM: tl.constexpr):
    """The queries [lo, hi) that can see any of the keys first...last; lo is a multiple of BM."""
    lo = 0
    hi = seq.q_len
    if opt.right is not None:
        lo = tl.maximum(first - seq.offset - opt.right, 0) // BM * BM
    if opt.left is not None:
        hi = tl.minimum(seq.q_len, last - seq.offset + opt.left + 1)
    return lo, hi


@triton.jit
def in_window(o_m, o_n, seq, opt):
    """Whether pairs [BM, BN] are inside the window and inside the matrix."""
    visible = in_matrix(o_m, o_n, seq)
    d = (o_m + seq.offset)[:, None] - o_n[None, :]
    if opt.left is not None:
        visible = visible & (d <= opt.left)
    if opt.right is not None:
        visible = visible & (d >= -opt.right)
    return visible


@triton.jit
def exponent_unit(opt):
    """The factor that turns scores into exponents of 2, see the top of this file."""
    unit = LOG2E
    if opt.rescored is None:
        unit = opt.scale * LOG2E
    return unit


@triton.jit
def scale_scores(s, opt):
    """Return the scores of dot products s before biases are added, and d score / d (scale s)."""
    slope = 1.0
    if opt.rescored is not None:
        s = s * opt.scale
    if opt.softcap is not None:
        t = tanh(s / opt.softcap)
        s = opt.softcap * t
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def absolute_distance(o_m, o_n, seq):
    """|i + offset - j| of each pair [BM, BN], in float32."""
    return tl.abs((o_m + seq.offset)[:, None] - o_n[None, :]).to(tl.float32)


@triton.jit
def visible_and_bias(
    seq, i_h, row, col, opt, CHECKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Return which pairs [BM, BN] of a tile are visible, and the bias to add to their scores.

    The mask program is left out. Without CHECKED, all pairs are known to be in the window.
    """
    o_n = col + tl.arange(0, BN)
    visible = o_n[None, :] >= 0
    if CHECKED:
        visible = in_window(row + tl.arange(0, BM), o_n, seq, opt)
    if opt.bool_mask is not None:
        visible = visible & (load_matrix_tile(opt.bool_mask, seq, i_h, row, col, 0, BM, BN) != 0)
    bias = 0.0
    if opt.added_mask is not None:
        bias = load_matrix_tile(opt.added_mask, seq, i_h, row, col, -INF, BM, BN).to(tl.float32)
        visible = visible & (bias != -INF)
    if opt.table is not None:
        entry = load_bias(seq, i_h, row + tl.arange(0, BM), col, opt, BN)
        visible = visible & (entry != -INF)
        bias = bias + entry
    return visible, bias


@triton.jit
def scores(
    b_q,  # [BM, BD]
    b_k,  # [BN, BD]
    seq,
    i_h,
    row,  # the first query of the tile
    col,  # the first key of the tile
    coverage,  # how many pairs the mask program makes visible
    opt,
    CHECKED: tl.constexpr,  # whether to check the window and the tails
    PRECISION: tl.constexpr,
):
    """Return the scores [BM, BN], -inf where excluded; visible pairs; d score / d (scale q.k)."""
    BM: tl.constexpr = b_q.shape[0]
    BN: tl.constexpr = b_k.shape[0]
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    if opt.p_program is not None:  # before the product, so both need not be in registers
        allowed = program_pairs(coverage, seq, i_h, row, col, opt, BM, BN)
    s, slope = scale_scores(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), opt)
    visible, bias = visible_and_bias(seq, i_h, row, col, opt, CHECKED, BM, BN)
    if opt.p_program is not None:
        visible = visible & allowed
    if opt.added_mask is not None or opt.table is not None:
        s = s + bias
    if opt.alibi is not None:
        slope_of_head = tl.load(opt.alibi.p + seq.i_b * opt.alibi.b + i_h * opt.alibi.h)
        s = s - slope_of_head * absolute_distance(o_m, o_n, seq)
    if CHECKED or opt.excludes is not None:
        s = tl.where(visible, s, -INF)  # selected: NaN in excluded pairs has no effect
    return s, visible, slope


@triton.jit
def wait_for_loads(b_x, PRECISION: tl.constexpr):
    """Barrier after the loads of two products and before the first product.

    In float32 a thread reads whole rows of both operands. If the compiler waits only between the
    two products, all of the first operand stays in registers meanwhile, and registers spill.
    """
    if b_x.dtype == tl.float32 and PRECISION == "ieee":
        tl.debug_barrier()


@triton.jit
def any_query_sees(visible):
    """Whether at least one query of a tile [BM, BN] can see each key [BN]."""
    return tl.max(visible.to(tl.int32), axis=0) > 0


@triton.jit
def start_softmax(BM: tl.constexpr, BD: tl.constexpr):
    """The initial state of the online softmax: m, l, acc."""
    m = tl.full([BM], -INF, tl.float32)
    return m, tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)


@triton.jit
def sink_score(opt, i_b, i_h):
    """The sink of a head in the unit of the scores, at most 1e30; -inf after the last sequence."""
    exists = i_b >= 0
    if opt.batch is not None:
        exists = i_b < opt.batch
    sink = tl.load(opt.sinks.p + i_b * opt.sinks.b + i_h * opt.sinks.h, mask=exists, other=-INF)
    if opt.rescored is None:
        sink = sink / opt.scale
    return tl.where(sink > 1e30, 1e30, sink)


@triton.jit
def start_with_sink(opt, i_b, i_h, BM: tl.constexpr):
    """The initial m and l with the sink, a key whose value is 0; for a sink of inf, l is inf."""
    sink = sink_score(opt, i_b, i_h)
    l = tl.where(sink == -INF, 0.0, tl.where(sink == 1e30, INF, 1.0))
    return tl.zeros([BM], tl.float32) + sink, tl.zeros([BM], tl.float32) + l


@triton.jit
def exponent(s, m, unit, opt):
    """(s - m) * unit, in the order that suits the unit, see the top of this file."""
    if opt.rescored is None:
        x = s * unit - m * unit
    else:
        x = (s - m) * unit
    return x


@triton.jit
def update_softmax(m, l, s, unit, opt):
    """Return the new m and l, exp(s - m) [BM, BN], and the factor [BM] that rescales old sums."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    m_safe = tl.where(m_new == -INF, 0.0, m_new)  # -inf - m must not be NaN
    p = tl.exp2(exponent(s, m_safe[:, None], unit, opt))
    shrink = tl.exp2(exponent(m, m_safe, unit, opt))
    return m_new, l * shrink + tl.sum(p, axis=1), p, shrink


@triton.jit
def log_sum_exp(m, l, unit, opt):
    """m + log(l) in natural units and float64, -inf for a fully masked row."""
    if opt.rescored is None:
        top = (m * unit).to(tl.float64) * LN2  # from the same m * unit that was subtracted
    else:
        top = m.to(tl.float64)
    total = tl.where(l == 0.0, 1.0, l).to(tl.float64)
    return tl.where(l == 0.0, -INF, top + tl.log(total))


@triton.jit
def probabilities(s, high, low, unit, opt):
    """exp(s - lse) [BM, BN], with lse in the two parts of :class:`Statistics`."""
    if opt.rescored is None:
        x = (s * unit - high[:, None]) - low[:, None]
    else:
        x = ((s - high[:, None]) - low[:, None]) * unit
    return tl.exp2(x)


@triton.jit
def dropout_keep(seq, i_h, o_m, col, opt, BM: tl.constexpr, BN: tl.constexpr):
    """Whether dropout keeps pairs [BM, BN]; see ``reference.dropout_keep``.

    One Philox call gives the draws of eight neighbouring keys, in four words of two halves. The
    joins put them in the order of the keys: word 0 low, word 0 high, word 1 low, and so on.
    """
    zero = tl.zeros([BM, BN // 8], tl.int32)
    blocks = col // 8 + tl.arange(0, BN // 8)
    w0, w1, w2, w3 = tl.philox(
        tl.load(opt.p_seed),
        (zero + o_m[:, None]).to(tl.uint32),
        (zero + blocks[None, :]).to(tl.uint32),
        (zero + i_h).to(tl.uint32),
        (zero + seq.i_b).to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [BM, BN]).to(tl.int32) < opt.threshold
