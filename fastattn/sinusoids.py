"""The frequencies of sinusoidal position encodings, exact to 2**-65 of a turn per position.

Column c of the encoding of position p is ``sin(2 pi a)``, where a is the fractional part of
``p * frequency[c] + phase[c]``, counted in turns. As 64-bit fixed-point fractions both are
integers, and integer arithmetic mod 2**64 gives a without any rounding, however large p is.
Cosines are sines a quarter turn ahead.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_TURN = 2**64
_QUARTER = 2**62
_EIGHTH = 2**61
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
_DIGITS = 50  # 64 bits are 20 digits; the others absorb the errors of dim multiplications
_MULTIPLE = 16  # of the number of columns: kernels load whole vectors


class _Column(NamedTuple):
    power: int | None  # the frequency is max_timescale ** -(power * step); None: the column is zero
    phase: int  # in units of 2**-64 of a turn; a quarter makes a cosine of the sine


# The layouts, dim -> (step, columns), differ in the order of sines and cosines.
def _interleaved(dim: int) -> tuple[Fraction, list[_Column]]:
    return Fraction(2, dim), [_Column(c // 2, c % 2 * _QUARTER) for c in range(dim)]


def _split_exponent(dim: int) -> tuple[Fraction, list[_Column]]:
    return Fraction(1, dim), [_Column(c, c % 2 * _QUARTER) for c in range(dim)]


def _marian(dim: int) -> tuple[Fraction, list[_Column]]:
    sines = (dim + 1) // 2
    columns = [_Column(i, 0) for i in range(sines)]
    return Fraction(2, dim), columns + [_Column(i, _QUARTER) for i in range(dim - sines)]


def _tensor2tensor(dim: int) -> tuple[Fraction, list[_Column]]:
    half = dim // 2
    columns = [_Column(i, phase) for phase in (0, _QUARTER) for i in range(half)]
    return Fraction(1, max(half - 1, 1)), columns + [_Column(None, 0)] * (dim % 2)


_LAYOUTS: dict[str, Callable[[int], tuple[Fraction, list[_Column]]]] = {
    "interleaved": _interleaved,
    "tensor2tensor": _tensor2tensor,
    "marian": _marian,
    "split_exponent": _split_exponent,
}

LAYOUTS = tuple(_LAYOUTS)


class Sinusoids(NamedTuple):
    """64-bit unsigned integers; the columns are zero-padded to a multiple of 16."""

    frequency: array[int]
    phase: array[int]
    pairs: array[int]  # frequencies shared by a sine and a cosine; empty in split_exponent


@lru_cache(maxsize=256)
def sinusoids(dim: int, layout: str, max_timescale: float) -> Sinusoids:
    """Return the frequencies (turns per position) and phases (turns) of columns, times 2**64."""
    step, columns = _LAYOUTS[layout](dim) if dim > 0 else (Fraction(0), [])
    with localcontext() as context:
        context.prec = _DIGITS
        # turns[k] = 2^64 max_timescale^(-k step) / 2 pi, the frequency of power k
        ratio = (-Decimal(max_timescale).ln() * step.numerator / step.denominator).exp()
        turns = [_TURN / (2 * _PI)]
        for _ in range(dim):
            turns.append(turns[-1] * ratio)
        frequency = [
            0 if column.power is None else int(turns[column.power].to_integral_value())
            for column in columns
        ]
    padding = [0] * (-dim % _MULTIPLE)
    phase = [column.phase for column in columns]
    of_sines = [
        f for f, c in zip(frequency, columns, strict=True) if c.power is not None and not c.phase
    ]
    return Sinusoids(
        frequency=array("Q", frequency + padding),
        phase=array("Q", phase + padding),
        pairs=array("Q", [] if layout == "split_exponent" else of_sines),
    )


def encode_positions(positions: Tensor, dim: int, layout: str, max_timescale: float) -> Tensor:
    """Return the encoding of int64 positions [...] in float64 [..., dim]."""
    table = sinusoids(dim, layout, max_timescale)
    frequency, phase = (
        torch.frombuffer(column, dtype=torch.int64)[:dim].to(positions.device)
        if dim > 0
        else positions.new_empty(0)
        for column in (table.frequency, table.phase)
    )
    # The nearest multiple of a quarter turn, and the distance from it, at most an eighth of a turn.
    # int64 products wrap around, as intended.
    angle = positions.unsqueeze(-1) * frequency + phase + _EIGHTH
    quadrant = (angle >> 62) & 3
    distance = ((angle & (_QUARTER - 1)) - _EIGHTH).to(torch.float64) * (2 * math.pi / _TURN)
    sine = torch.where((quadrant & 1) == 1, torch.cos(distance), torch.sin(distance))
    return torch.where(quadrant >= 2, -sine, sine)
