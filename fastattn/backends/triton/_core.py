"""Building blocks of the attention kernels: operands, visibility, scores, online softmax, dropout.

Scores have one of two units. Without an option that changes them they stay the plain q . k, and the
softmax works on s * unit with unit = scale * log2(e), in one multiply-add. Otherwise they are the
scores of ``docs/design.md`` and unit = log2(e). It is applied after the row's maximum is
subtracted, because a mask full of finfo.min would overflow before.

Positions in a sequence are int32, which ``why_not`` ensures; offsets of addresses are int64.
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
    excludes: int | None  # 1 if more than the window excludes pairs
    rescored: int | None  # 1 if scores are more than scale * q . k
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

    p_high: Any  # lse in the unit of the exponent
    p_low: Any  # the rounding error of p_high
    p_delta: Any  # delta - glse


class Sequence(NamedTuple):
    """The sequence that a program works on."""

    i_b: Any  # its index
    q_len: Any
    k_len: Any
    offset: Any
    q_base: Any  # the factor of stride b: the index of the sequence, or the rows before it
    k_base: Any


@triton.jit
def batch_sequence(o, i_b):
    """Sequence i_b of a rectangular batch."""
    i_b = tl.cast(i_b, tl.int64)
    offset = 0
    if o.offset is None:
        offset = o.k_len - o.q_len
    else:
        offset = o.offset
    return Sequence(i_b, o.q_len, o.k_len, offset, i_b, i_b)


@triton.jit
def locate(o, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's sequence, head and tile; the tile may be past the end.

    Packed sequences begin anywhere. The tiles of sequence b begin at start_b // BLOCK + b. So each
    sequence has enough tiles, and the lengths need not be summed. The rows after the last sequence
    form one extra sequence: its queries are fully masked, and no query can see its keys.
    """
    if o.p_q_starts is None:
        heads = o.heads // o.group if OF_KEYS else o.heads
        tiles = tl.cdiv(o.k_len if OF_KEYS else o.q_len, BLOCK)
        i_bh = tl.program_id(0) // tiles
        return batch_sequence(o, i_bh // heads), i_bh % heads, tl.program_id(0) % tiles
    else:
        p_starts = o.p_k_starts if OF_KEYS else o.p_q_starts
        tiles = (o.k_len if OF_KEYS else o.q_len) // BLOCK + o.batch + 1
        n = tl.program_id(0) % tiles
        started = 0
        for b in range(0, o.batch + 1, 128):
            o_b = b + tl.arange(0, 128)
            starts = tl.load(p_starts + o_b, mask=o_b <= o.batch, other=2**40)
            started += tl.sum((starts // BLOCK + o_b <= n).to(tl.int32))
        i_b = tl.maximum(started - 1, 0)
        seq = packed_sequence(o, i_b, OF_KEYS)
        tile = n - i_b - (seq.k_base if OF_KEYS else seq.q_base).to(tl.int32) // BLOCK
        return seq, tl.program_id(0) // tiles, tile


@triton.jit
def row_tile(rows, BLOCK):
    """Return the matrix of this program and its first row; successive programs share a matrix."""
    tiles = tl.cdiv(rows, BLOCK)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK


@triton.jit
def matrix_tile(rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Return the matrix of this program, its first row and its first column."""
    column_tiles = tl.cdiv(columns, BN)
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0) // column_tiles
    first = tl.program_id(0) % column_tiles * BN
    return (tile // row_tiles).to(tl.int64), tile % row_tiles * BM, first


@triton.jit
def packed_sequence(o, i_b, OF_KEYS: tl.constexpr):
    """Packed sequence i_b; the one after the last has the other queries, or OF_KEYS the keys."""
    q_base, q_len = _extent(o.p_q_starts, i_b, o.batch, o.q_len, not OF_KEYS)
    k_base, k_len = _extent(o.p_k_starts, i_b, o.batch, o.k_len, OF_KEYS)
    offset = 0
    if o.offset is None:
        offset = k_len - q_len
    else:
        offset = o.offset
    return Sequence(tl.cast(i_b, tl.int64), q_len, k_len, offset, q_base, k_base)


@triton.jit
def _extent(p_starts, i_b, batch, rows, TO_THE_END: tl.constexpr):
    """The first row and the length of a sequence, clamped to the existing rows."""
    begin = tl.minimum(tl.maximum(tl.load(p_starts + i_b), 0), rows)
    end = tl.load(p_starts + tl.minimum(i_b + 1, batch))
    if TO_THE_END:
        end = tl.where(i_b == batch, rows, end)
    end = tl.minimum(tl.maximum(end, begin), rows)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def first_row(o, seq, i_h):
    """The first row of a head in lse [B, Hq, Lq], or [Hq, T] for packed sequences."""
    i_row = seq.i_b * 0
    if o.p_q_starts is None:
        i_row = (seq.i_b * o.heads + i_h) * o.q_len
    else:
        i_row = tl.cast(i_h, tl.int64) * o.q_len + seq.q_base
    return i_row


@triton.jit
def load_statistics(stats, o_rows, m_m):
    """lse in two parts and delta [BM]; (inf, 0, 0) where ``m_m`` is False."""
    high = tl.load(stats.p_high + o_rows, mask=m_m, other=INF)
    low = tl.load(stats.p_low + o_rows, mask=m_m, other=0.0)
    return high, low, tl.load(stats.p_delta + o_rows, mask=m_m, other=0.0)


@triton.jit
def load_rows(x, i_b, i_h, o_l, m_l, D: tl.constexpr, BD: tl.constexpr):
    """Rows ``o_l`` of a head [BL, BD], 0 where ``m_l`` is False and in columns from D on."""
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
def load_pairs(x, seq, i_h, row, first, other, BM: tl.constexpr, BN: tl.constexpr):
    """The tile [BM, BN] at (row, first) of an operand [B, H, Lq, Lk].

    Offsets within the tile are int32, which halves the registers; ``pairs`` limits the strides.
    """
    p_x = x.p + seq.i_b * x.b + i_h * x.h
    p_x = p_x + tl.cast(row, tl.int64) * x.l + tl.cast(first, tl.int64) * x.d
    o_x = tl.arange(0, BM)[:, None] * x.l + tl.arange(0, BN)[None, :] * x.d
    inside = in_matrix(row + tl.arange(0, BM), first + tl.arange(0, BN), seq)
    return tl.load(p_x + o_x, mask=inside, other=other)


@triton.jit
def in_matrix(o_m, o_n, seq):
    """Which pairs [BM, BN] exist: padded rows and columns of a tile do not."""
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
def visible_keys(first, last, seq, o, BN: tl.constexpr):
    """The keys that the queries first...last can see: (lo, full_lo, full_hi, hi).

    Keys of [lo, hi) are visible to at least one query. Keys of [full_lo, full_hi) are visible to
    all of them, so the window and the tail need no check. These two bounds are multiples of BN.
    """
    lo = 0
    full_lo = 0
    hi = seq.k_len
    full = seq.k_len
    if o.left is not None:  # i + offset - left <= j
        lo = tl.maximum(first + seq.offset - o.left, 0)
        full_lo = (tl.maximum(last + seq.offset - o.left, 0) + BN - 1) // BN * BN
    if o.right is not None:  # j <= i + offset + right
        hi = tl.maximum(tl.minimum(seq.k_len, last + seq.offset + o.right + 1), 0)
        full = tl.maximum(tl.minimum(seq.k_len, first + seq.offset + o.right + 1), 0)
    full_hi = full // BN * BN
    if o.left is not None:
        full_lo = tl.minimum(full_lo, (hi + BN - 1) // BN * BN)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def visible_queries(first, last, seq, o, BM: tl.constexpr):
    """The queries [lo, hi) that can see any of the keys first...last; lo is a multiple of BM."""
    lo = 0
    hi = seq.q_len
    if o.right is not None:
        lo = tl.maximum(first - seq.offset - o.right, 0) // BM * BM
    if o.left is not None:
        hi = tl.minimum(seq.q_len, last - seq.offset + o.left + 1)
    return lo, hi


@triton.jit
def in_window(o_m, o_n, seq, o):
    """Whether pairs [BM, BN] are inside the window and inside the matrix."""
    visible = in_matrix(o_m, o_n, seq)
    d = (o_m + seq.offset)[:, None] - o_n[None, :]
    if o.left is not None:
        visible = visible & (d <= o.left)
    if o.right is not None:
        visible = visible & (d >= -o.right)
    return visible


@triton.jit
def exponent_unit(o):
    """The factor that turns scores into exponents of 2."""
    unit = LOG2E
    if o.rescored is None:
        unit = o.scale * LOG2E
    return unit


@triton.jit
def scaled(s, o):
    """Return the scores of dot products before anything is added, and d score / d s."""
    slope = 1.0
    if o.rescored is not None:
        s = s * o.scale
    if o.softcap is not None:
        t = tanh(s / o.softcap)
        s = o.softcap * t
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def distance(o_m, o_n, seq):
    """|i + offset - j| of each pair [BM, BN], in float32."""
    return tl.abs((o_m + seq.offset)[:, None] - o_n[None, :]).to(tl.float32)


@triton.jit
def masked(seq, i_h, row, first, o, CHECKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return the pairs of a tile that the window and the masks leave, and what the masks add."""
    o_n = first + tl.arange(0, BN)
    visible = o_n[None, :] >= 0
    if CHECKED:
        visible = in_window(row + tl.arange(0, BM), o_n, seq, o)
    if o.bool_mask is not None:
        visible = visible & (load_pairs(o.bool_mask, seq, i_h, row, first, 0, BM, BN) != 0)
    bias = 0.0
    if o.added_mask is not None:
        bias = load_pairs(o.added_mask, seq, i_h, row, first, -INF, BM, BN).to(tl.float32)
        visible = visible & (bias != -INF)
    if o.table is not None:
        entry = load_bias(seq, i_h, row + tl.arange(0, BM), first, o, BN)
        visible = visible & (entry != -INF)
        bias = bias + entry
    return visible, bias


@triton.jit
def scores(
    b_q,  # [BM, BD]
    b_k,  # [BN, BD]
    seq,
    i_h,
    row,  # the first row of the tile
    first,
    coverage,  # how many pairs the mask program makes visible
    o,
    CHECKED: tl.constexpr,  # whether to check the window and the tails
    PRECISION: tl.constexpr,
):
    """Return the scores [BM, BN], -inf where excluded; visible pairs; d score / d (scale q.k)."""
    BM: tl.constexpr = b_q.shape[0]
    BN: tl.constexpr = b_k.shape[0]
    o_m = row + tl.arange(0, BM)
    o_n = first + tl.arange(0, BN)
    if o.p_program is not None:  # before the product, so both need not be in registers
        allowed = program_pairs(coverage, seq, i_h, row, first, o, BM, BN)
    s, slope = scaled(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), o)
    visible, bias = masked(seq, i_h, row, first, o, CHECKED, BM, BN)
    if o.p_program is not None:
        visible = visible & allowed
    if o.added_mask is not None or o.table is not None:
        s = s + bias
    if o.alibi is not None:
        slope_of_head = tl.load(o.alibi.p + seq.i_b * o.alibi.b + i_h * o.alibi.h)
        s = s - slope_of_head * distance(o_m, o_n, seq)
    if CHECKED or o.excludes is not None:
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
def sink_score(o, i_b, i_h):
    """The sink of a head in the unit of the scores, at most 1e30; -inf after the last sequence."""
    exists = i_b >= 0
    if o.batch is not None:
        exists = i_b < o.batch
    sink = tl.load(o.sinks.p + i_b * o.sinks.b + i_h * o.sinks.h, mask=exists, other=-INF)
    if o.rescored is None:
        sink = sink / o.scale
    return tl.where(sink > 1e30, 1e30, sink)


@triton.jit
def start_with_sink(o, i_b, i_h, BM: tl.constexpr):
    """The initial m and l with the sink: a key whose value is 0. l is inf for a sink of inf."""
    sink = sink_score(o, i_b, i_h)
    l = tl.where(sink == -INF, 0.0, tl.where(sink == 1e30, INF, 1.0))
    return tl.zeros([BM], tl.float32) + sink, tl.zeros([BM], tl.float32) + l


@triton.jit
def exponent(s, m, unit, o):
    """(s - m) * unit, in the order that is exact enough for this unit; see the module."""
    if o.rescored is None:
        x = s * unit - m * unit
    else:
        x = (s - m) * unit
    return x


@triton.jit
def update_softmax(m, l, s, unit, o):
    """Return the new m and l, exp(s - m) [BM, BN], and the factor that rescales earlier sums."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    m_safe = tl.where(m_new == -INF, 0.0, m_new)  # -inf - m must not be NaN
    p = tl.exp2(exponent(s, m_safe[:, None], unit, o))
    shrink = tl.exp2(exponent(m, m_safe, unit, o))
    return m_new, l * shrink + tl.sum(p, axis=1), p, shrink


@triton.jit
def log_sum_exp(m, l, unit, o):
    """m + log(l) in natural units and float64, -inf for a fully masked row."""
    if o.rescored is None:
        top = (m * unit).to(tl.float64) * LN2  # from the same m * unit that was subtracted
    else:
        top = m.to(tl.float64)
    total = tl.where(l == 0.0, 1.0, l).to(tl.float64)
    return tl.where(l == 0.0, -INF, top + tl.log(total))


@triton.jit
def probabilities(s, high, low, unit, o):
    """exp(s - lse) [BM, BN], with lse in the unit of the exponent and in two parts."""
    if o.rescored is None:
        x = (s * unit - high[:, None]) - low[:, None]
    else:
        x = ((s - high[:, None]) - low[:, None]) * unit
    return tl.exp2(x)


@triton.jit
def dropout_keep(seq, i_h, o_m, first, o, BM: tl.constexpr, BN: tl.constexpr):
    """Whether dropout keeps pairs [BM, BN]; see ``reference.dropout_keep``.

    One Philox call gives the draws of eight neighbouring keys. Joins interleave them: the outermost
    new dimension is the high bit of the word's number, the innermost selects the half of the word.
    """
    zero = tl.zeros([BM, BN // 8], tl.int32)
    blocks = first // 8 + tl.arange(0, BN // 8)
    w0, w1, w2, w3 = tl.philox(
        tl.load(o.p_seed),
        (zero + o_m[:, None]).to(tl.uint32),
        (zero + blocks[None, :]).to(tl.uint32),
        (zero + i_h).to(tl.uint32),
        (zero + seq.i_b).to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [BM, BN]).to(tl.int32) < o.threshold
