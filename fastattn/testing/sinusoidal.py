"""The cases of ``sinusoidal_encoding`` and their proof.

The judge is the reference in float64, whose positions and frequencies are exact;
``tests/ops/test_sinusoidal.py`` checks them with 50 digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import LAYOUTS
from fastattn.testing import memory
from fastattn.testing.calls import Operands
from fastattn.testing.cases import Draw, NamedCase, drawn
from fastattn.testing.judge import Proof


@dataclass(frozen=True)
class SinusoidalCase(NamedCase):
    """One call of ``sinusoidal_encoding`` on x [B, H, L, D]."""

    shape: tuple[int, int, int, int] = (2, 1, 33, 64)
    layout: str = "interleaved"
    offset: int = 0
    positions: str | None = None  # their dimensions: "l", "bl" or "bhl"
    max_timescale: float = 10000.0
    scale: float = 1.0
    padding_idx: int | None = None
    memory: str = "contiguous"


_SIZES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "shape": [
        *((2, 1, 19, width) for width in (1, 2, 3, 7, 16, 33, 64, 100, 512, 1023)),
        *((2, 3, 20, 37), (1, 1, 3000, 96), (0, 1, 3, 4), (1, 1, 0, 4), (1, 1, 3, 0)),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "offset scale": [(99_999_990, 8.0), (99_999_990, 0.5)] * 2,
    "offset padding_idx": [(-7, -3)] * 4,
    "offset max_timescale": [(99_999_990, 500.0)] * 4,
    "positions padding_idx": [(dims, 1) for dims in ("l", "bl", "bhl")] * 4,
    "memory": list(memory.LAYOUTS),
}


def _make(case: SinusoidalCase, dtype: torch.dtype) -> Operands:
    draw = Draw(case, dtype)
    x = draw.placed(draw.normal(*case.shape), case.memory)
    positions = None
    if case.positions is not None:
        sizes = zip("bhl", case.shape, strict=False)
        shape = [size if dim in case.positions else 1 for dim, size in sizes]
        positions = torch.randint(-5, 10**8, shape, generator=draw.generator)
        positions[..., ::4] = 1  # the padding index
    options = SinusoidalOptions(
        case.offset, case.layout, case.max_timescale, case.scale, case.padding_idx
    )
    return Operands("sinusoidal_encoding", {"x": x, "positions": positions}, options)


check_sinusoidal = Proof(
    "sinusoidal_encoding",
    (SinusoidalCase("plain"), *drawn(SinusoidalCase("mixed"), 80, _SIZES, _OPTIONS)),
    make=_make,
)
