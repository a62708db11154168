"""The kernels of decoding: attention to chunks of a cache, and the merge of their results.

A chunk has a fixed number of keys, whatever the batch is, so that the result of a row depends only
on its own sequence. The query heads that share a key head are rows of one tile,
r = head * Lq + i, so keys and values are read once for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton._core import (
    INF,
    Sequence,
    absolute_distance,
    any_query_sees,
    exponent_unit,
    in_window,
    log_sum_exp,
    matrix_tile,
    scale_scores,
    start_softmax,
    start_with_sink,
    update_softmax,
    visible_keys,
)
from fastattn.backends.triton._mask_program import NONE, program_pairs_of, tile_coverage_of
from fastattn.backends.triton._relative_bias import load_bias


class Cache(NamedTuple):
    """The location of the keys of a sequence: an entry of the cache, or pages."""

    p_lengths: Any  # [B] int64
    p_entries: Any  # [B] int64, or None: entry b
    p_table: Any  # [B, P] int32, or None
    table_row: int | None  # its stride
    length: int  # keys of an entry or a page
    entries: int  # number of entries or pages
    capacity: int  # the most keys of a sequence


@triton.jit
def _locate_keys(cache, i_b, o_n, m_n):
    """Return the entry (or page) of each key ``o_n``, its row there, and which keys exist.

    Of the keys ``m_n``, those exist whose entry is inside the cache.
    """
    if cache.p_table is not None:
        p_table = cache.p_table + i_b * cache.table_row
        entry = tl.load(p_table + o_n // cache.length, mask=m_n, other=0).to(tl.int64)
        row = o_n % cache.length
    else:
        entry = i_b + o_n * 0
        if cache.p_entries is not None:
            entry = tl.load(cache.p_entries + i_b) + o_n * 0
        row = o_n
    return entry, row.to(tl.int64), m_n & (entry >= 0) & (entry < cache.entries)


@triton.jit
def _load_cached(x, entry, row, i_h, m_n, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a cache [E, Hkv, N, D] as [BN, BD], 0 where ``m_n`` is False and from column D on."""
    o_d = tl.arange(0, BD)
    p_x = x.p + i_h * x.h + (entry * x.b + row * x.l)[:, None] + o_d.to(tl.int64)[None, :] * x.d
    return tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _cached_sequence(cache, opt, i_b):
    """Sequence i_b, its length clamped to the capacity; its last query is at its last key."""
    k_len = tl.minimum(tl.maximum(tl.load(cache.p_lengths + i_b), 0), cache.capacity).to(tl.int32)
    return Sequence(i_b, opt.q_len, k_len, k_len - opt.q_len, i_b, i_b)


@triton.jit
def decode_chunks(
    q,  # [B, Hq, Lq, D]
    k,  # [E, Hkv, N, D]
    v,  # [E, Hkv, N, Dv]
    cache,
    opt,
    p_max,  # [B, Hq, Lq, chunks] float32
    p_sum,  # [B, Hq, Lq, chunks] float32
    p_acc,  # [B, Hq, Lq, chunks, Dv] float32
    chunks,  # the number of chunks of a sequence that fills the cache
    WAYS: tl.constexpr,  # programs that share the chunks of a sequence
    CHUNK: tl.constexpr,  # keys, a multiple of BN
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The softmax state (max, sum, acc) of one tile of rows for every WAYS-th chunk of the keys."""
    rows = opt.group * opt.q_len
    tiles = tl.cdiv(rows, BM)
    kv_heads = opt.heads // opt.group
    first_chunk = tl.program_id(0) % WAYS
    tile_index = tl.program_id(0) // WAYS
    tile = tile_index % tiles
    i_bh = (tile_index // tiles).to(tl.int64)
    i_b = i_bh // kv_heads
    i_hkv = i_bh % kv_heads
    seq = _cached_sequence(cache, opt, i_b)
    lo, full_lo, full_hi, hi = visible_keys(0, opt.q_len - 1, seq, opt, BN)

    o_r = tile * BM + tl.arange(0, BM)
    m_r = o_r < rows
    o_m = o_r % opt.q_len
    i_h = i_hkv * opt.group + o_r // opt.q_len
    o_d = tl.arange(0, BD)
    p_q = q.p + i_b * q.b + (i_h * q.h + o_m.to(tl.int64) * q.l)[:, None]
    p_q = p_q + o_d.to(tl.int64)[None, :] * q.d
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
    slopes = tl.zeros([BM], tl.float32)
    if opt.alibi is not None:
        slopes = tl.load(opt.alibi.p + i_b * opt.alibi.b + i_h * opt.alibi.h, mask=m_r, other=0.0)

    unit = exponent_unit(opt)
    for chunk in range(lo // CHUNK + first_chunk, tl.cdiv(hi, CHUNK), WAYS):
        m, l, acc = start_softmax(BM, BDV)
        start = tl.maximum(chunk * CHUNK, lo // BN * BN)
        for col in range(start, tl.minimum((chunk + 1) * CHUNK, hi), BN):
            coverage = tile_coverage_of(seq, i_hkv, o_m, col, opt, BM, BN)
            if coverage != NONE:
                o_n = col + tl.arange(0, BN)
                entry, row, m_n = _locate_keys(cache, i_b, o_n, (o_n >= lo) & (o_n < hi))
                if opt.p_program is not None:  # before the product, as in `scores`
                    allowed = program_pairs_of(coverage, seq, i_hkv, o_m, col, opt, BM, BN)
                b_k = _load_cached(k, entry, row, i_hkv, m_n, D, BD)
                s, slope = scale_scores(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), opt)
                visible = in_window(o_m, o_n, seq, opt)
                if opt.p_program is not None:
                    visible = visible & allowed
                if opt.table is not None:  # a row after the last head reads its table
                    i_table = tl.minimum(i_h, opt.heads - 1)[:, None]
                    bias = load_bias(seq, i_table, o_m, col, opt, BN)
                    visible = visible & (bias != -INF)
                    s = s + bias
                if opt.alibi is not None:
                    s = s - slopes[:, None] * absolute_distance(o_m, o_n, seq)
                s = tl.where(visible, s, -INF)
                m, l, p, shrink = update_softmax(m, l, s, unit, opt)
                if opt.excludes is not None:
                    m_n = m_n & any_query_sees(visible & m_r[:, None])  # 0 * NaN would be NaN
                b_v = _load_cached(v, entry, row, i_hkv, m_n, DV, BDV)
                acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision=PRECISION)
        o_part = (i_bh * rows + o_r) * chunks + chunk
        o_v = tl.arange(0, BDV)
        tl.store(p_max + o_part, m, mask=m_r)
        tl.store(p_sum + o_part, l, mask=m_r)
        p_part = p_acc + o_part[:, None] * DV + o_v[None, :]
        tl.store(p_part, acc, mask=m_r[:, None] & (o_v < DV)[None, :])


@triton.jit
def decode_combine(
    cache,
    opt,
    p_max,
    p_sum,
    p_acc,
    chunks,
    out,  # [B, Hq, Lq, Dv]
    p_lse,  # [B, Hq, Lq] float64
    CHUNK: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Merge the softmax states of one row's chunks, in their order and BN at a time."""
    i_row = tl.program_id(0).to(tl.int64)
    i_m = i_row % opt.q_len
    i_bh = i_row // opt.q_len
    i_b = i_bh // opt.heads
    seq = _cached_sequence(cache, opt, i_b)
    lo, full_lo, full_hi, hi = visible_keys(0, opt.q_len - 1, seq, opt, BN)
    begin = lo // CHUNK
    end = tl.cdiv(hi, CHUNK)
    unit = exponent_unit(opt)
    o_v = tl.arange(0, BDV)
    m = tl.full([1], -INF, tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BDV], tl.float32)
    if opt.sinks is not None:
        m, l = start_with_sink(opt, i_b, i_bh % opt.heads, 1)
    for first in range(begin, end, BN):
        o_c = first + tl.arange(0, BN)
        m_c = o_c < end
        o_part = i_row * chunks + o_c
        maxima = tl.load(p_max + o_part, mask=m_c, other=-INF)[None, :]
        sums = tl.load(p_sum + o_part, mask=m_c, other=0.0)[None, :]
        p_part = p_acc + o_part[:, None] * DV + o_v[None, :]
        chunk_sums = tl.load(p_part, mask=m_c[:, None] & (o_v < DV)[None, :], other=0.0)
        # A chunk acts as a key whose score is its maximum and whose weight is `share * sums`.
        m, _, share, shrink = update_softmax(m, l, maxima, unit, opt)  # share [1, BN]
        l = l * shrink + tl.sum(share * sums, axis=1)
        chunk_sums = tl.where(tl.trans(share) == 0.0, 0.0, tl.trans(share) * chunk_sums)  # 0 * NaN
        acc = acc * shrink[:, None] + tl.sum(chunk_sums, axis=0)[None, :]
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    p_out = out.p + i_b * out.b + (i_bh % opt.heads) * out.h + i_m * out.l
    p_out = p_out + o_v.to(tl.int64)[None, :] * out.d
    tl.store(p_out, acc.to(out.p.dtype.element_ty), mask=(o_v < DV)[None, :])
    tl.store(p_lse + i_row + tl.arange(0, 1), log_sum_exp(m, l, unit, opt))


@triton.jit
def append_rows(
    x,  # [B, Hkv, L, D]
    cached,  # [E, Hkv, N, D]
    cache,
    heads,
    rows,
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Write one tile of the new rows of a head behind the cached rows of its sequence."""
    i_bh, begin, col = matrix_tile(rows, width, BM, BN)
    o_l = begin + tl.arange(0, BM)
    o_d = col + tl.arange(0, BN)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_n = tl.load(cache.p_lengths + i_b) + o_l
    inside = (o_l < rows) & (o_n >= 0) & (o_n < cache.capacity)
    entry, row, inside = _locate_keys(cache, i_b, o_n, inside)
    inside = inside[:, None] & (o_d < width)[None, :]
    o_x = o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    b_x = tl.load(x.p + i_b * x.b + i_h * x.h + o_x, mask=inside, other=0.0)
    o_kept = (entry * cached.b + row * cached.l)[:, None] + o_d.to(tl.int64)[None, :] * cached.d
    tl.store(cached.p + i_h * cached.h + o_kept, b_x, mask=inside)
