"""What attention kernels are made of: operands, visibility, scores, the online softmax, dropout.

Scores have one of two units. Without an option that changes them they stay the bare q . k, and the
softmax works on s * unit with unit = scale * log2(e), in one multiply-add. Else they are those of
``docs/design.md`` and unit = log2(e), which is applied after the row's maximum is taken off: a mask
full of finfo.min would overflow before.

Places in a sequence are int32, which ``why_not`` sees to; what is added to an address is int64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Operand(NamedTuple):
    """A tensor [B, H, L, D], or [B, H, Lq, Lk]. A broadcast dimension has stride 0.

    Of packed sequences, [T, H, D], b is the stride of a row, as l is: what is counted by b there is
    the rows before a sequence.
    """

    p: Any
    b: int  # strides, in elements
    h: int
    l: int
    d: int


class Options(NamedTuple):
    """What the scores of a call are made with. What is None compiles to nothing."""

    heads: int
    group: int  # query heads that share a key head
    q_len: int  # of packed sequences: of all of them
    k_len: int
    scale: float  # positive
    offset: int | None  # None: the last query is at the last key
    left: int | None  # None: unlimited
    right: int | None
    seen: Operand | None  # the boolean mask
    added: Operand | None  # the additive mask
    alibi: Operand | None  # slopes, of strides b and h
    softcap: float | None
    rescored: int | None  # 1 if any of the last three is there
    p_seed: Any  # None without dropout
    threshold: int | None  # a draw below it is kept
    kept_scale: float | None  # 65536 / threshold
    p_q_starts: Any = None  # [B + 1] int64, of packed sequences
    p_k_starts: Any = None
    batch: int | None = None


class Sequence(NamedTuple):
    """What a program works on."""

    i_b: Any  # its number
    q_len: Any
    k_len: Any
    offset: Any
    q_at: Any  # what its operands count by b: its number, or the rows before it
    k_at: Any


@triton.jit
def whole(o, i_b):
    """Sequence i_b of a batch of equals."""
    i_b = tl.cast(i_b, tl.int64)
    offset = 0
    if o.offset is None:
        offset = o.k_len - o.q_len
    else:
        offset = o.offset
    return Sequence(i_b, o.q_len, o.k_len, offset, i_b, i_b)


@triton.jit
def locate(o, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's sequence, its head, and which tile of it, which may be beyond its end.

    Packed sequences begin anywhere. Sequence b has the tiles start_b // BLOCK + b and on: so there
    are enough for each, and nobody has to add up the lengths. One more sequence are the rows after
    the last one, which see nothing and are seen by nobody.
    """
    if o.p_q_starts is None:
        heads = o.heads // o.group if OF_KEYS else o.heads
        tiles = tl.cdiv(o.k_len if OF_KEYS else o.q_len, BLOCK)
        i_bh = tl.program_id(0) // tiles
        return whole(o, i_bh // heads), i_bh % heads, tl.program_id(0) % tiles
    else:
        p_starts = o.p_k_starts if OF_KEYS else o.p_q_starts
        tiles = (o.k_len if OF_KEYS else o.q_len) // BLOCK + o.batch + 1
        n = tl.program_id(0) % tiles
        begun = 0
        for b in range(0, o.batch + 1, 128):
            o_b = b + tl.arange(0, 128)
            starts = tl.load(p_starts + o_b, mask=o_b <= o.batch, other=2**40)
            begun += tl.sum((starts // BLOCK + o_b <= n).to(tl.int32))
        i_b = tl.maximum(begun - 1, 0)
        q_at, q_len = _extent(o.p_q_starts, i_b, o.batch, o.q_len, not OF_KEYS)
        k_at, k_len = _extent(o.p_k_starts, i_b, o.batch, o.k_len, OF_KEYS)
        offset = 0
        if o.offset is None:
            offset = k_len - q_len
        else:
            offset = o.offset
        tile = n - i_b - (k_at if OF_KEYS else q_at).to(tl.int32) // BLOCK
        at = Sequence(i_b.to(tl.int64), q_len, k_len, offset, q_at, k_at)
        return at, tl.program_id(0) // tiles, tile


@triton.jit
def _extent(p_starts, i_b, batch, rows, TO_THE_END: tl.constexpr):
    """Where a sequence begins, and its length; within the rows there are, whatever is stored."""
    begin = tl.minimum(tl.maximum(tl.load(p_starts + i_b), 0), rows)
    end = tl.load(p_starts + tl.minimum(i_b + 1, batch))
    if TO_THE_END:
        end = tl.where(i_b == batch, rows, end)
    end = tl.minimum(tl.maximum(end, begin), rows)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def first_row(o, at, i_h):
    """Where the rows of a head lie in lse [B, Hq, Lq], or [Hq, T] of packed sequences."""
    i_row = at.i_b * 0
    if o.p_q_starts is None:
        i_row = (at.i_b * o.heads + i_h) * o.q_len
    else:
        i_row = tl.cast(i_h, tl.int64) * o.q_len + at.q_at
    return i_row


@triton.jit
def load_rows(x, i_b, i_h, o_l, m_l, D: tl.constexpr, BD: tl.constexpr):
    """Rows ``o_l`` of a head [BL, BD], 0 where ``m_l`` is False and beyond D."""
    o_d = tl.arange(0, BD)
    p_x = x.p + i_b * x.b + i_h * x.h
    p_x = p_x + o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    m_x = m_l[:, None]
    if D != BD:
        m_x = m_x & (o_d < D)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(x, i_b, i_h, o_l, m_l, block, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    p_x = x.p + i_b * x.b + i_h * x.h
    p_x = p_x + o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    tl.store(p_x, block.to(x.p.dtype.element_ty), mask=m_l[:, None] & (o_d < D)[None, :])


@triton.jit
def load_pairs(x, at, i_h, row, first, other, BM: tl.constexpr, BN: tl.constexpr):
    """The tile [BM, BN] at (row, first) of an operand [B, H, Lq, Lk].

    Within the tile offsets are int32, half the registers; ``sdpa.py`` sees to the strides.
    """
    p_x = x.p + at.i_b * x.b + i_h * x.h
    p_x = p_x + tl.cast(row, tl.int64) * x.l + tl.cast(first, tl.int64) * x.d
    o_x = tl.arange(0, BM)[:, None] * x.l + tl.arange(0, BN)[None, :] * x.d
    inside = in_matrix(row + tl.arange(0, BM), first + tl.arange(0, BN), at)
    return tl.load(p_x + o_x, mask=inside, other=other)


@triton.jit
def in_matrix(o_m, o_n, at):
    return (o_m < at.q_len)[:, None] & (o_n < at.k_len)[None, :]


@triton.jit
def tanh(x):
    """x P(x^2) where |x| < 0.625, which keeps small x relatively exact; else by e^-2|x|."""
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
def keys_seen(first, last, at, o, BN: tl.constexpr):
    """The keys that the queries first...last can see: (lo, full_lo, full_hi, hi).

    Each of [lo, hi) is seen by some query, each of [full_lo, full_hi) by all of them: there is no
    window and no tail to look at. These two are multiples of BN.
    """
    lo = 0
    full_lo = 0
    hi = at.k_len
    full = at.k_len
    if o.left is not None:  # i + offset - left <= j
        lo = tl.maximum(first + at.offset - o.left, 0)
        full_lo = (tl.maximum(last + at.offset - o.left, 0) + BN - 1) // BN * BN
    if o.right is not None:  # j <= i + offset + right
        hi = tl.maximum(tl.minimum(at.k_len, last + at.offset + o.right + 1), 0)
        full = tl.maximum(tl.minimum(at.k_len, first + at.offset + o.right + 1), 0)
    full_hi = full // BN * BN
    if o.left is not None:
        full_lo = tl.minimum(full_lo, (hi + BN - 1) // BN * BN)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def queries_seeing(first, last, at, o, BM: tl.constexpr):
    """The queries [lo, hi) that can see any of the keys first...last; lo is a multiple of BM."""
    lo = 0
    hi = at.q_len
    if o.right is not None:
        lo = tl.maximum(first - at.offset - o.right, 0) // BM * BM
    if o.left is not None:
        hi = tl.minimum(at.q_len, last - at.offset + o.left + 1)
    return lo, hi


@triton.jit
def in_window(o_m, o_n, at, o):
    """Which pairs [BM, BN] are inside the window and inside the matrix."""
    visible = in_matrix(o_m, o_n, at)
    d = (o_m + at.offset)[:, None] - o_n[None, :]
    if o.left is not None:
        visible = visible & (d <= o.left)
    if o.right is not None:
        visible = visible & (d >= -o.right)
    return visible


@triton.jit
def exponent_unit(o):
    """What scores are multiplied by for exp2."""
    unit = LOG2E
    if o.rescored is None:
        unit = o.scale * LOG2E
    return unit


@triton.jit
def scaled(s, o):
    """Return the scores of these dot products before what is added to them; d score / d s."""
    slope = 1.0
    if o.rescored is not None:
        s = s * o.scale
    if o.softcap is not None:
        t = tanh(s / o.softcap)
        s = o.softcap * t
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def distance(o_m, o_n, at):
    return tl.abs((o_m + at.offset)[:, None] - o_n[None, :]).to(tl.float32)


@triton.jit
def scores(
    b_q,  # [BM, BD]
    b_k,  # [BN, BD]
    at,
    i_h,
    row,  # where the tile begins
    first,
    o,
    CHECKED: tl.constexpr,  # whether the window and the tails have to be looked at
    PRECISION: tl.constexpr,
):
    """Return the scores [BM, BN], -inf where excluded; what is visible; d score / d (scale q.k)."""
    BM: tl.constexpr = b_q.shape[0]
    BN: tl.constexpr = b_k.shape[0]
    o_m = row + tl.arange(0, BM)
    o_n = first + tl.arange(0, BN)
    s, slope = scaled(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), o)
    visible = o_n[None, :] >= 0
    if CHECKED:
        visible = in_window(o_m, o_n, at, o)
    if o.seen is not None:
        visible = visible & (load_pairs(o.seen, at, i_h, row, first, 0, BM, BN) != 0)
    if o.added is not None:
        added = load_pairs(o.added, at, i_h, row, first, -INF, BM, BN).to(tl.float32)
        visible = visible & (added != -INF)
        s = s + added
    if o.alibi is not None:
        slope_of_head = tl.load(o.alibi.p + at.i_b * o.alibi.b + i_h * o.alibi.h)
        s = s - slope_of_head * distance(o_m, o_n, at)
    if CHECKED or o.seen is not None or o.added is not None:
        s = tl.where(visible, s, -INF)  # selected: a NaN that nobody sees ends here
    return s, visible, slope


@triton.jit
def wait_for_loads(b_x, PRECISION: tl.constexpr):
    """Wait for the whole program, after what two products read is loaded and before the first one.

    In float32 a thread reads whole rows of both operands. If the compiler waits only between the
    one and the other, all of the first is in registers meanwhile, and they spill.
    """
    if b_x.dtype == tl.float32 and PRECISION == "ieee":
        tl.debug_barrier()


@triton.jit
def keys_visible(visible):
    """Which keys of a tile [BM, BN] any query sees [BN]."""
    return tl.max(visible.to(tl.int32), axis=0) > 0


@triton.jit
def start_softmax(BM: tl.constexpr, BD: tl.constexpr):
    """The state of the online softmax of nothing: m, l, acc."""
    m = tl.full([BM], -INF, tl.float32)
    return m, tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)


@triton.jit
def exponent(s, m, unit, o):
    """(s - m) * unit, by the way that is exact enough in this unit; see the module."""
    if o.rescored is None:
        x = s * unit - m * unit
    else:
        x = (s - m) * unit
    return x


@triton.jit
def update_softmax(m, l, s, unit, o):
    """Return the new m and l, exp(s - m) [BM, BN], and what everything older is multiplied by."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    m_safe = tl.where(m_new == -INF, 0.0, m_new)  # -inf - m must not be NaN
    p = tl.exp2(exponent(s, m_safe[:, None], unit, o))
    shrink = tl.exp2(exponent(m, m_safe, unit, o))
    return m_new, l * shrink + tl.sum(p, axis=1), p, shrink


@triton.jit
def log_sum_exp(m, l, unit, o):
    """m + log(l) in natural units and float64, -inf for a row that sees nothing."""
    if o.rescored is None:
        top = (m * unit).to(tl.float64) * LN2  # of the very m * unit that was taken off
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
def kept(at, i_h, o_m, first, o, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs [BM, BN] dropout keeps; see ``reference.dropout_keep``.

    One Philox call gives the draws of eight neighbours. Joins put them side by side: the outermost
    of the new dimensions is the high bit of the word's number, the innermost its half.
    """
    zero = tl.zeros([BM, BN // 8], tl.int32)
    blocks = first // 8 + tl.arange(0, BN // 8)
    w0, w1, w2, w3 = tl.philox(
        tl.load(o.p_seed),
        (zero + o_m[:, None]).to(tl.uint32),
        (zero + blocks[None, :]).to(tl.uint32),
        (zero + i_h).to(tl.uint32),
        (zero + at.i_b).to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [BM, BN]).to(tl.int32) < o.threshold
