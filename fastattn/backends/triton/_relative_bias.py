"""A relative bias in the kernels: the entries of its table that a tile of pairs reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def table_entries(seq, o_m, col, opt, BN: tl.constexpr):
    """The table entry of each pair [BM, BN]: middle + position(i + offset) - position(j).

    A pair outside the matrix reads the entry of the last row or column, so no load needs a mask.
    """
    position_m = tl.minimum(o_m, seq.q_len - 1) + seq.offset
    position_n = tl.minimum(col + tl.arange(0, BN), seq.k_len - 1)
    if opt.p_positions is not None:
        position_m = tl.load(opt.p_positions + position_m)
        position_n = tl.load(opt.p_positions + position_n)
    return opt.middle + position_m[:, None] - position_n[None, :]


@triton.jit
def load_bias(seq, i_h, o_m, col, opt, BN: tl.constexpr):
    """The relative bias of a tile of pairs [BM, BN], for one head or a head per query, [BM, 1]."""
    p_table = opt.table.p + seq.i_b * opt.table.b + i_h * opt.table.h
    entry = table_entries(seq, o_m, col, opt, BN)
    if opt.p_q_starts is not None or opt.offset is None:  # the host may not know the distances
        entry = tl.minimum(tl.maximum(entry, 0), 2 * opt.middle)
    return tl.load(p_table + entry)
