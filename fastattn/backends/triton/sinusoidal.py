"""Sinusoidal position encoding on Triton: x * scale + sin(2 pi frac(position * frequency + phase)).

Angles are 64-bit fractions of a turn, so products wrap correctly; see ``fastattn/sinusoids.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends._sinusoidal import make_encoding
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.backends.triton._core import matrix_tile
from fastattn.backends.triton._launch import launch, operand
from fastattn.backends.triton._table import Launch

_TILE = Launch(16, 64, 4, 1)  # rows, columns; memory bound: any width of at least one cache line

QUARTER = tl.constexpr(2**62)
EIGHTH = tl.constexpr(2**61)
TURN = tl.constexpr(2.0**64)


@triton.jit
def sine_of_fraction(angle):
    """sin(2 pi angle / 2^64) in float32, from the nearest multiple of a quarter turn.

    The angle is t of a turn away from that multiple, |t| <= 1/8.

    The relative error is 3e-9 for the sine and 2e-10 for the cosine, plus the rounding.
    """
    rotated = angle + EIGHTH
    quadrant = (rotated >> 62) & 3
    t = ((rotated & (QUARTER - 1)) - EIGHTH).to(tl.float32) * (1.0 / TURN)
    tt = t * t
    series = (tt * -75.3935628 + 81.5923536) * tt - 41.3416615
    sine = t * 6.28318548 + t * (series * tt - 1.95191750e-7)
    cosine = ((tt * 59.4217088 - 85.4487638) * tt + 64.9393687) * tt - 19.7392088
    cosine = cosine * tt + 1.0
    value = tl.where((quadrant & 1) == 1, cosine, sine)
    return tl.where(quadrant >= 2, -value, value)


@triton.jit
def encode_rows(
    x,  # [B, H, L, D]
    out,  # [B, H, L, D]
    positions,  # [B, H, L, 1] int64, or None
    p_frequency,  # [D] int64
    p_phase,  # [D] int64
    heads,
    rows,
    width,
    offset,
    scale,
    padding,  # the position that has no encoding, or None
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of rows and columns: x * scale + encoding."""
    i_bh, row, col = matrix_tile(rows, width, BM, BN)
    o_l = row + tl.arange(0, BM)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_d = col + tl.arange(0, BN)
    m_l = o_l < rows
    m_d = o_d < width

    if positions is None:
        position = o_l.to(tl.int64) + offset
    else:
        p_p = positions.p + i_b * positions.b + i_h * positions.h + o_l.to(tl.int64) * positions.l
        position = tl.load(p_p, mask=m_l, other=0)
    frequency = tl.load(p_frequency + o_d, mask=m_d, other=0)
    phase = tl.load(p_phase + o_d, mask=m_d, other=0)
    encoding = sine_of_fraction(position[:, None] * frequency[None, :] + phase[None, :])
    if padding is not None:
        encoding = tl.where((position == padding)[:, None], 0.0, encoding)

    m_x = m_l[:, None] & m_d[None, :]
    o_x = o_l.to(tl.int64)[:, None] * x.l + o_d.to(tl.int64)[None, :] * x.d
    b_x = tl.load(x.p + i_b * x.b + i_h * x.h + o_x, mask=m_x, other=0.0).to(tl.float32)
    o_out = o_l.to(tl.int64)[:, None] * out.l + o_d.to(tl.int64)[None, :] * out.d
    y = (b_x * scale + encoding).to(out.p.dtype.element_ty)
    tl.store(out.p + i_b * out.b + i_h * out.h + o_out, y, mask=m_x)


def _encode(
    x: Tensor,  # [(B, (H,)) L, D]
    positions: Tensor | None,  # broadcasts to [(B, (H,)) L]
    *,
    options: SinusoidalOptions,
    columns: tuple[Tensor, ...],
    offset: int | None,
    out: Tensor | None,
) -> Tensor:
    """Launch ``encode_rows`` on x with up to four dimensions."""
    out = torch.empty_like(x) if out is None else out
    if positions is not None:
        positions = positions.expand(x.shape[:-1])
    new_axes = (None,) * (4 - x.ndim)
    batch, heads, rows, width = x[new_axes].shape
    launch(
        encode_rows,
        _TILE,
        _TILE.tiles(rows, width) * batch * heads,
        x.device,
        x=operand(x[new_axes]),
        out=operand(out[new_axes]),
        positions=None if positions is None else operand(positions[new_axes].unsqueeze(-1)),
        p_frequency=columns[0],
        p_phase=columns[1],
        heads=heads,
        rows=rows,
        width=width,
        offset=options.offset if offset is None else offset,
        scale=options.scale,
        padding=options.padding_idx,
    )
    return out


sinusoidal_encoding = make_encoding(_encode)
