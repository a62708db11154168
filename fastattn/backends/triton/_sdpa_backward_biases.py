"""The gradients of biases, without atomics: of an additive mask and of a table of distances."""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    INF,
    batch_sequence,
    first_row,
    in_matrix,
    load_rows,
    load_statistics,
    packed_sequence,
    row_tile,
    scores,
    visible_keys,
    wait_for_loads,
)
from fastattn.backends.triton._mask_program import NONE, tile_coverage
from fastattn.backends.triton._relative_bias import table_entries
from fastattn.backends.triton._sdpa_backward import score_gradients


@triton.jit
def attention_backward_mask(
    q,
    k,
    v,
    g,
    opt,
    stats,
    p_grad,  # [Bm, Hm, Lq or its tiles, Lk or its tiles] float32
    mask_heads,
    batch_sum,  # sequences that share an element of the mask
    head_sum,  # heads that share an element of the mask
    SUM_Q: tl.constexpr,  # the mask is the same for every query
    SUM_K: tl.constexpr,  # ... for every key
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d mask for one tile of pairs: the sum of ds over all pairs that share an element."""
    k_tiles = tl.cdiv(opt.k_len, BN)
    q_tiles = tl.cdiv(opt.q_len, BM)
    k_tile = tl.program_id(0) % k_tiles
    tile_index = tl.program_id(0) // k_tiles
    q_tile = tile_index % q_tiles
    i_mask = (tile_index // q_tiles).to(tl.int64)
    col = k_tile * BN
    row = q_tile * BM
    o_m = row + tl.arange(0, BM)
    o_n = col + tl.arange(0, BN)
    m_n = o_n < opt.k_len

    total = tl.zeros([BM, BN], tl.float32)
    error = tl.zeros([BM, BN], tl.float32)
    for n in range(batch_sum * head_sum):
        i_b = i_mask // mask_heads + n // head_sum
        i_h = i_mask % mask_heads + n % head_sum
        seq = batch_sequence(opt, i_b)
        coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
        if coverage != NONE:
            o_rows = first_row(opt, seq, i_h) + o_m
            m_m = o_m < opt.q_len
            high, low, delta = load_statistics(stats, o_rows, m_m)
            b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
            b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & (high != INF), DV, BDV)
            b_k = load_rows(k, seq.k_base, i_h // opt.group, o_n, m_n, D, BD)
            b_v = load_rows(v, seq.k_base, i_h // opt.group, o_n, m_n, DV, BDV)
            wait_for_loads(b_v, PRECISION)
            s, visible, slope = scores(b_q, b_k, seq, i_h, row, col, coverage, opt, True, PRECISION)
            w, ds = score_gradients(
                b_v, b_do, high, low, delta, g,
                seq, i_h, row, col, s, visible, opt, BM, BN, PRECISION,
            )  # fmt: skip
            # One element may be the sum of thousands of terms, so the rounding errors are summed,
            # too.
            new_total = total + ds
            rounded_ds = new_total - total
            error += (total - (new_total - rounded_ds)) + (ds - rounded_ds)
            total = new_total
    total += error

    o_q = o_m
    o_k = o_n
    q_size = opt.q_len
    k_size = opt.k_len
    inside = in_matrix(o_m, o_n, opt)
    if SUM_Q:
        total = tl.sum(total, axis=0)[None, :]
        o_q = q_tile + tl.zeros([1], tl.int32)
        q_size = q_tiles
        inside = m_n[None, :]
    if SUM_K:
        total = tl.sum(total, axis=1)[:, None]
        o_k = k_tile + tl.zeros([1], tl.int32)
        k_size = k_tiles
        inside = (o_q < q_size)[:, None]
    p_g = p_grad + (i_mask * q_size + o_q[:, None]) * k_size + o_k[None, :]
    tl.store(p_g, total, mask=inside)


@triton.jit
def attention_backward_table(
    q,
    k,
    v,
    g,
    opt,
    stats,
    p_grad,  # [parts, Hq, entries] float32
    entries,
    parts,  # part n sums sequences n, n + parts, n + 2 parts, ...
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """d loss / d table for BN entries of one head: the sums of ds over the pairs that read them."""
    i_part, begin = row_tile(entries, BN)
    i_h = i_part % opt.heads
    total = tl.zeros([BN], tl.float32)
    if opt.p_q_starts is None:  # a batch has as many parts as sequences
        seq = batch_sequence(opt, i_part // opt.heads)
        total = _add_entries(
            total, begin, q, k, v, g, seq, i_h, opt, stats, D, DV, BD, BDV, PRECISION, BM, BN
        )
    else:
        for i_b in range((i_part // opt.heads).to(tl.int32), opt.batch, parts):
            seq = packed_sequence(opt, i_b, False)
            total = _add_entries(
                total, begin, q, k, v, g, seq, i_h, opt, stats, D, DV, BD, BDV, PRECISION, BM, BN
            )
    o_e = begin + tl.arange(0, BN)
    tl.store(p_grad + i_part * entries + o_e, total, mask=o_e < entries)


@triton.jit
def _add_entries(
    total,  # [BN]
    begin,  # the first entry
    q,
    k,
    v,
    g,
    seq,
    i_h,
    opt,
    stats,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Return ``total`` plus the sums of ds over the pairs of one sequence that read each entry.

    The tiles with such pairs are visited in a fixed order, and in a tile one entry after the other,
    because the pairs of an entry may be anywhere if the call has positions.
    """
    end = begin + BN
    o_e = begin + tl.arange(0, BN)
    row_lo = 0
    row_hi = seq.q_len
    if opt.p_positions is None:  # begin <= middle + i + offset - j < end for a key j
        entry_of_first_pair = opt.middle + seq.offset
        row_lo = tl.maximum(begin - entry_of_first_pair, 0) // BM * BM
        row_hi = tl.minimum(seq.q_len, end - entry_of_first_pair + seq.k_len - 1)
    for row in range(row_lo, row_hi, BM):
        o_m = row + tl.arange(0, BM)
        m_m = o_m < seq.q_len
        o_rows = first_row(opt, seq, i_h) + o_m
        high, low, delta = load_statistics(stats, o_rows, m_m)
        b_q = load_rows(q, seq.q_base, i_h, o_m, m_m, D, BD)
        b_do = load_rows(g.out, seq.q_base, i_h, o_m, m_m & (high != INF), DV, BDV)
        last = tl.minimum(row + BM, seq.q_len) - 1
        lo, full_lo, full_hi, hi = visible_keys(row, last, seq, opt, BN)
        if opt.p_positions is None:
            lo = tl.maximum(lo, opt.middle + row + seq.offset - end + 1)
            hi = tl.minimum(hi, opt.middle + last + seq.offset - begin + 1)
        for col in range(lo // BN * BN, hi, BN):
            b_e = table_entries(seq, o_m, col, opt, BN)
            coverage = tile_coverage(seq, i_h, row, col, opt, BM, BN)
            min_entry = tl.maximum(tl.min(tl.min(b_e, axis=1), axis=0), begin)
            max_entry = tl.minimum(tl.max(tl.max(b_e, axis=1), axis=0), end - 1)
            if (min_entry <= max_entry) & (coverage != NONE):
                o_n = col + tl.arange(0, BN)
                m_n = o_n < seq.k_len
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
                for e in range(min_entry, max_entry + 1):
                    entry_sum = tl.sum(tl.sum(tl.where(b_e == e, ds, 0.0), axis=1), axis=0)
                    total += tl.where(o_e == e, entry_sum, 0.0)
    return total
