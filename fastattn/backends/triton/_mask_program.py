"""Evaluates a mask program in the kernels, for a tile of pairs at once or pair by pair.

``fastattn/backends/_mask_program.py`` has the layout. The kernels read the steps themselves, so the
host waits for no number, and one compiled kernel serves every program.

The stack is one integer, whose lowest bits are the top value. The value of a pair has one bit. The
value of a tile has two: whether any of its pairs may be visible, and whether all are. The operators
apply to each bit; a tile whose pairs they cannot tell gets SOME.

Pairs outside the matrix have the value of the last row or column, so no load needs a mask.

A program of packed sequences has the rows of all of them, a program for a cache all of its keys. A
sequence ``seq`` reads its own part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.backends import _mask_program
from fastattn.backends._mask_program import Kind

FIELDS = tl.constexpr(_mask_program.FIELDS)
PADDING = tl.constexpr(_mask_program.PADDING)
ALL_OF = tl.constexpr(int(Kind.ALL_OF))
ANY_OF = tl.constexpr(int(Kind.ANY_OF))
INTERVAL = tl.constexpr(int(Kind.INTERVAL))
IDS = tl.constexpr(int(Kind.IDS))
# How many pairs of a tile are visible.
NONE = tl.constexpr(0)
SOME = tl.constexpr(1)
ALL = tl.constexpr(3)


@triton.jit
def tile_coverage(seq, i_h, row, col, opt, BM: tl.constexpr, BN: tl.constexpr):
    """How many pairs of a tile the program makes visible: NONE, SOME or ALL.

    SOME may also be a tile of which no or all pairs are visible. Without a program the result is
    ALL, which compiles to nothing.
    """
    return tile_coverage_of(seq, i_h, row + tl.arange(0, BM), col, opt, BM, BN)


@triton.jit
def program_pairs(coverage, seq, i_h, row, col, opt, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs [BM, BN] of a tile are visible, given its ``tile_coverage``."""
    return program_pairs_of(coverage, seq, i_h, row + tl.arange(0, BM), col, opt, BM, BN)


@triton.jit
def tile_coverage_of(seq, i_h, o_m, col, opt, BM: tl.constexpr, BN: tl.constexpr):
    """As ``tile_coverage``, for queries ``o_m`` [BM] in any order."""
    if opt.p_program is None:
        coverage = ALL
    else:
        coverage = _evaluate(seq, i_h, o_m, col, opt, False, BM, BN)
    return coverage


@triton.jit
def program_pairs_of(coverage, seq, i_h, o_m, col, opt, BM: tl.constexpr, BN: tl.constexpr):
    """As ``program_pairs``, for queries ``o_m`` [BM] in any order."""
    visible = tl.full([BM, BN], 1, tl.int32)
    if coverage != ALL:
        visible = _evaluate(seq, i_h, o_m, col, opt, True, BM, BN)
    return visible != 0


@triton.jit
def _evaluate(seq, i_h, o_m, col, opt, OF_PAIRS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The program's value for each pair [BM, BN] if OF_PAIRS, else its value for the tile."""
    o_m = tl.minimum(o_m, seq.q_len - 1)
    BITS: tl.constexpr = 1 if OF_PAIRS else 2  # of a value
    TOP: tl.constexpr = 1 if OF_PAIRS else 3  # the top value of a stack
    if OF_PAIRS:
        stack = tl.zeros([BM, BN], tl.int32)
    else:
        stack = tl.cast(0, tl.int64)
    steps = tl.load(opt.p_program)
    p_data = opt.p_program + 1 + steps * FIELDS  # of the next leaf
    for n in range(steps):
        p_step = opt.p_program + 1 + n * FIELDS
        kind = tl.load(p_step)
        if kind == ALL_OF:
            stack = (stack >> BITS) & (stack | (-1 - TOP))
        elif kind == ANY_OF:
            stack = (stack >> BITS) | (stack & TOP)
        else:
            if kind == INTERVAL:
                value, words = _interval_value(p_step, p_data, seq, o_m, col, opt, OF_PAIRS, BN)
            elif kind == IDS:
                value, words = _ids_value(p_step, p_data, seq, o_m, col, opt, OF_PAIRS, BN)
            else:
                value, words = _blocks_value(p_step, p_data, seq, i_h, o_m, col, opt, OF_PAIRS, BN)
            if tl.load(p_step + 1) != 0:  # negated
                value = TOP - value if OF_PAIRS else tl.where(value == SOME, SOME, TOP - value)
            stack = (stack << BITS) | value
            p_data += words
    return stack & TOP


@triton.jit
def _clamped_keys(seq, col, BN: tl.constexpr):
    """The keys of a tile [BN], clamped to the sequence."""
    return tl.minimum(col + tl.arange(0, BN), seq.k_len - 1)


@triton.jit
def _padded_length(length, opt):
    """The padded length, in the data of a leaf, of the queries or the keys of a call."""
    if opt.p_q_starts is not None:
        length = length + PADDING
    return tl.cdiv(length, PADDING) * PADDING


@triton.jit
def _rows_before(rows, opt):
    """``rows``, the number before a packed sequence, or 0 in a batch of separate sequences."""
    before = 0
    if opt.p_q_starts is not None:
        before = rows
    return before


@triton.jit
def _coverage(any_visible, all_visible):
    """The value of a tile, of which any or all pairs are visible."""
    return any_visible.to(tl.int32) + 2 * all_visible.to(tl.int32)


@triton.jit
def _interval_value(p_step, p_data, seq, o_m, col, opt, OF_PAIRS: tl.constexpr, BN: tl.constexpr):
    """Return the value of low[i] <= j < high[i], and the size of the data [batch, 2, Lq']."""
    batch = tl.load(p_step + 2).to(tl.int64)
    width = _padded_length(opt.q_len, opt)
    p_low = p_data + seq.i_b % batch * 2 * width + _rows_before(seq.q_base, opt)
    low = tl.load(p_low + o_m)
    high = tl.load(p_low + width + o_m)
    if OF_PAIRS:
        o_n = col + tl.arange(0, BN)
        value = (low[:, None] <= o_n[None, :]) & (o_n[None, :] < high[:, None])
        value = value.to(tl.int32)
    else:
        end = tl.minimum(col + BN, seq.k_len)
        first_in_interval = tl.maximum(low, col)  # the part of the tile's keys in the interval
        end_in_interval = tl.minimum(high, end)
        any_visible = tl.max((first_in_interval < end_in_interval).to(tl.int32), axis=0)
        all_visible = tl.min(
            ((first_in_interval == col) & (end_in_interval == end)).to(tl.int32), axis=0
        )
        value = _coverage(any_visible, all_visible)
    return value, batch * 2 * width


@triton.jit
def _ids_value(p_step, p_data, seq, o_m, col, opt, OF_PAIRS: tl.constexpr, BN: tl.constexpr):
    """Return the value of query_id[i] == key_id[j], and the size of the data [batch, Lq' + Lk']."""
    batch = tl.load(p_step + 2).to(tl.int64)
    q_width = _padded_length(opt.q_len, opt)
    width = q_width + _padded_length(opt.k_len, opt)
    p_ids = p_data + seq.i_b % batch * width
    query_ids = tl.load(p_ids + _rows_before(seq.q_base, opt) + o_m)
    key_ids = tl.load(p_ids + q_width + _rows_before(seq.k_base, opt) + _clamped_keys(seq, col, BN))
    if OF_PAIRS:
        value = (query_ids[:, None] == key_ids[None, :]).to(tl.int32)
    else:
        min_q = tl.min(query_ids, axis=0)
        max_q = tl.max(query_ids, axis=0)
        min_k = tl.min(key_ids, axis=0)
        max_k = tl.max(key_ids, axis=0)
        any_visible = (min_q <= max_k) & (min_k <= max_q)
        all_visible = (min_q == max_k) & (min_k == max_q)
        value = _coverage(any_visible, all_visible)
    return value, batch * width


@triton.jit
def _blocks_value(
    p_step, p_data, seq, i_h, o_m, col, opt, OF_PAIRS: tl.constexpr, BN: tl.constexpr
):
    """Return the value of states [batch, heads, rows, columns] with bits [n, block_k, words], and
    the size of both."""
    batch = tl.load(p_step + 2).to(tl.int64)
    heads = tl.load(p_step + 3)
    block_q = tl.load(p_step + 4)
    block_k = tl.load(p_step + 5)
    partial = tl.load(p_step + 6).to(tl.int64)
    words = tl.cdiv(block_q, 32)
    columns = tl.cdiv(opt.k_len, block_k)  # of a cache: of its capacity
    states = tl.cdiv(seq.q_len, block_q).to(tl.int64) * columns  # of a head
    p_states = p_data + (seq.i_b % batch * heads + i_h % heads) * states
    p_bits = p_data + batch * heads * states
    o_n = _clamped_keys(seq, col, BN)
    if OF_PAIRS:
        o_r = (o_m // block_q).to(tl.int64)
        state = tl.load(p_states + o_r[:, None] * columns + (o_n // block_k)[None, :])
        o_key = tl.maximum(state - 2, 0).to(tl.int64) * block_k + (o_n % block_k)[None, :]
        lane = o_m % block_q
        p_word = p_bits + o_key * words + (lane // 32)[:, None]
        word = tl.load(p_word, mask=state >= 2, other=0)
        value = tl.where(state < 2, state, (word >> (lane % 32)[:, None]) & 1)
    else:
        min_state = tl.zeros([BN], tl.int32) + 1
        max_state = tl.zeros([BN], tl.int32)
        last = tl.max(o_m, axis=0) // block_q
        for r in range(tl.min(o_m, axis=0) // block_q, last + 1):
            state = tl.load(p_states + tl.cast(r, tl.int64) * columns + o_n // block_k)
            min_state = tl.minimum(min_state, state)
            max_state = tl.maximum(max_state, state)
        all_visible = (tl.min(min_state, axis=0) == 1) & (tl.max(max_state, axis=0) == 1)
        value = _coverage(tl.max(max_state, axis=0) > 0, all_visible)
    return value, batch * heads * states + partial * block_k * words
