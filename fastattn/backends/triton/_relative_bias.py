"""A relative bias in the kernels: the entries of its table that a tile of pairs reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entries_of(at, row, first, o, BM: tl.constexpr, BN: tl.constexpr):
    """The entry of each pair [BM, BN]: middle + position(i + offset) - position(j).

    A pair outside the matrix reads the entry of the last row or column, so no load needs a mask.
    """
    at_m = tl.minimum(row + tl.arange(0, BM), at.q_len - 1) + at.offset
    at_n = tl.minimum(first + tl.arange(0, BN), at.k_len - 1)
    if o.p_positions is not None:
        at_m = tl.load(o.p_positions + at_m)
        at_n = tl.load(o.p_positions + at_n)
    return o.middle + at_m[:, None] - at_n[None, :]


@triton.jit
def load_bias(at, i_h, row, first, o, BM: tl.constexpr, BN: tl.constexpr):
    """The relative bias of a tile of pairs [BM, BN]."""
    p_table = o.table.p + at.i_b * o.table.b + i_h * o.table.h
    return tl.load(p_table + entries_of(at, row, first, o, BM, BN))
