"""A relative bias in the kernels: the entries of its table that a tile of pairs reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entries_of(seq, o_m, first, o, BN: tl.constexpr):
    """The entry of each pair [BM, BN]: middle + position(i + offset) - position(j).

    A pair outside the matrix reads the entry of the last row or column, so no load needs a mask.
    """
    position_m = tl.minimum(o_m, seq.q_len - 1) + seq.offset
    position_n = tl.minimum(first + tl.arange(0, BN), seq.k_len - 1)
    if o.p_positions is not None:
        position_m = tl.load(o.p_positions + position_m)
        position_n = tl.load(o.p_positions + position_n)
    return o.middle + position_m[:, None] - position_n[None, :]


@triton.jit
def load_bias(seq, i_h, o_m, first, o, BN: tl.constexpr):
    """The relative bias of a tile of pairs [BM, BN], of one head or of each query's own [BM, 1]."""
    p_table = o.table.p + seq.i_b * o.table.b + i_h * o.table.h
    entry = entries_of(seq, o_m, first, o, BN)
    if o.p_q_starts is not None or o.offset is None:  # the host may not know the distances
        entry = tl.minimum(tl.maximum(entry, 0), 2 * o.middle)
    return tl.load(p_table + entry)
