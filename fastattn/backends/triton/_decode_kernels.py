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
    any_query_sees,
    distance,
    exponent_unit,
    in_window,
    log_sum_exp,
    matrix_tile,
    scaled,
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
def _place(cache, i_b, o_n, m_n):
    """The entries, or pages, of keys ``o_n`` and their rows, clamped to the cache."""
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
    """Rows [BN, BD] of a cache [E, Hkv, N, D], 0 where ``m_n`` is False and from column D on."""
    o_d = tl.arange(0, BD)
    p_x = x.p + i_h * x.h + (entry * x.b + row * x.l)[:, None] + o_d.to(tl.int64)[None, :] * x.d
    return tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _sequence(cache, o, i_b):
    """Sequence i_b of the cache, its length clamped; the last query is at the last key."""
    k_len = tl.minimum(tl.maximum(tl.load(cache.p_lengths + i_b), 0), cache.capacity).to(tl.int32)
    return Sequence(i_b, o.q_len, k_len, k_len - o.q_len, i_b, i_b)


@triton.jit
def decode_chunks(
    q,  # [B, Hq, Lq, D]
    k,  # [E, Hkv, N, D]
    v,  # [E, Hkv, N, Dv]
    cache,
    o,
    p_max,  # [B, Hq, Lq, chunks] float32
    p_sum,  # [B, Hq, Lq, chunks] float32
    p_acc,  # [B, Hq, Lq, chunks, Dv] float32
    chunks,  # of a sequence that fills the cache
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
    """The softmax state of one tile of rows of a key head, for every WAYS-th chunk."""
    rows = o.group * o.q_len
    tiles = tl.cdiv(rows, BM)
    kv_heads = o.heads // o.group
    first_chunk = tl.program_id(0) % WAYS
    tile_index = tl.program_id(0) // WAYS
    tile = tile_index % tiles
    i_bh = (tile_index // tiles).to(tl.int64)
    i_b = i_bh // kv_heads
    i_hkv = i_bh % kv_heads
    seq = _sequence(cache, o, i_b)
    lo, full_lo, full_hi, hi = visible_keys(0, o.q_len - 1, seq, o, BN)

    o_r = tile * BM + tl.arange(0, BM)
    m_r = o_r < rows
    o_m = o_r % o.q_len
    i_h = i_hkv * o.group + o_r // o.q_len
    o_d = tl.arange(0, BD)
    p_q = q.p + i_b * q.b + (i_h * q.h + o_m.to(tl.int64) * q.l)[:, None]
    p_q = p_q + o_d.to(tl.int64)[None, :] * q.d
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
    slopes = tl.zeros([BM], tl.float32)
    if o.alibi is not None:
        slopes = tl.load(o.alibi.p + i_b * o.alibi.b + i_h * o.alibi.h, mask=m_r, other=0.0)

    unit = exponent_unit(o)
    for chunk in range(lo // CHUNK + first_chunk, tl.cdiv(hi, CHUNK), WAYS):
        m, l, acc = start_softmax(BM, BDV)
        start = tl.maximum(chunk * CHUNK, lo // BN * BN)
        for first in range(start, tl.minimum((chunk + 1) * CHUNK, hi), BN):
            coverage = tile_coverage_of(seq, i_hkv, o_m, first, o, BM, BN)
            if coverage != NONE:
                o_n = first + tl.arange(0, BN)
                entry, row, m_n = _place(cache, i_b, o_n, (o_n >= lo) & (o_n < hi))
                if o.p_program is not None:  # before the product, as in `scores`
                    allowed = program_pairs_of(coverage, seq, i_hkv, o_m, first, o, BM, BN)
                b_k = _load_cached(k, entry, row, i_hkv, m_n, D, BD)
                s, slope = scaled(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), o)
                visible = in_window(o_m, o_n, seq, o)
                if o.p_program is not None:
                    visible = visible & allowed
                if o.table is not None:  # a row after the last head reads its table
                    i_table = tl.minimum(i_h, o.heads - 1)[:, None]
                    bias = load_bias(seq, i_table, o_m, first, o, BN)
                    visible = visible & (bias != -INF)
                    s = s + bias
                if o.alibi is not None:
                    s = s - slopes[:, None] * distance(o_m, o_n, seq)
                s = tl.where(visible, s, -INF)
                m, l, p, shrink = update_softmax(m, l, s, unit, o)
                if o.excludes is not None:
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
    o,
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
    """Merge the chunks of one row in order, BN at a time."""
    i_row = tl.program_id(0).to(tl.int64)
    i_m = i_row % o.q_len
    i_bh = i_row // o.q_len
    i_b = i_bh // o.heads
    seq = _sequence(cache, o, i_b)
    lo, full_lo, full_hi, hi = visible_keys(0, o.q_len - 1, seq, o, BN)
    begin = lo // CHUNK
    end = tl.cdiv(hi, CHUNK)
    unit = exponent_unit(o)
    o_v = tl.arange(0, BDV)
    m = tl.full([1], -INF, tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BDV], tl.float32)
    if o.sinks is not None:
        m, l = start_with_sink(o, i_b, i_bh % o.heads, 1)
    for first in range(begin, end, BN):
        o_c = first + tl.arange(0, BN)
        m_c = o_c < end
        o_part = i_row * chunks + o_c
        maxima = tl.load(p_max + o_part, mask=m_c, other=-INF)[None, :]
        sums = tl.load(p_sum + o_part, mask=m_c, other=0.0)[None, :]
        p_part = p_acc + o_part[:, None] * DV + o_v[None, :]
        chunk_sums = tl.load(p_part, mask=m_c[:, None] & (o_v < DV)[None, :], other=0.0)
        # A chunk is a key whose score is its maximum, with the chunk's sum for a weight of 1.
        m, _, share, shrink = update_softmax(m, l, maxima, unit, o)  # share [1, BN]
        l = l * shrink + tl.sum(share * sums, axis=1)
        chunk_sums = tl.where(tl.trans(share) == 0.0, 0.0, tl.trans(share) * chunk_sums)  # 0 * NaN
        acc = acc * shrink[:, None] + tl.sum(chunk_sums, axis=0)[None, :]
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    p_out = out.p + i_b * out.b + (i_bh % o.heads) * out.h + i_m * out.l
    p_out = p_out + o_v.to(tl.int64)[None, :] * out.d
    tl.store(p_out, acc.to(out.p.dtype.element_ty), mask=(o_v < DV)[None, :])
    tl.store(p_lse + i_row + tl.arange(0, 1), log_sum_exp(m, l, unit, o))


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
    """Append one tile of the new rows of a head to the old ones."""
    i_bh, begin, first = matrix_tile(rows, width, BM, BN)
    o_l = begin + tl.arange(0, BM)
    o_d = first + tl.arange(0, BN)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_n = tl.load(cache.p_lengths + i_b) + o_l
    inside = (o_l < rows) & (o_n >= 0) & (o_n < cache.capacity)
    entry, row, inside = _place(cache, i_b, o_n, inside)
    inside = inside[:, None] & (o_d < width)[None, :]
    o_x = o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    b_x = tl.load(x.p + i_b * x.b + i_h * x.h + o_x, mask=inside, other=0.0)
    o_kept = (entry * cached.b + row * cached.l)[:, None] + o_d.to(tl.int64)[None, :] * cached.d
    tl.store(cached.p + i_h * cached.h + o_kept, b_x, mask=inside)
