"""The cases of ``sinusoidal_encoding``, their inputs and their proof.

The judge is the reference in float64, whose positions and frequencies are exact;
``tests/ops/test_sinusoidal.py`` checks them with 50 digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import LAYOUTS
from fastattn.testing import memory
from fastattn.testing.calls import Operands
from fastattn.testing.cases import NamedCase, numbers_of
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


def _cases() -> Iterator[SinusoidalCase]:
    for layout in LAYOUTS:
        for dim in (1, 2, 3, 7, 16, 33, 64, 100, 512, 1023):
            yield SinusoidalCase(f"{layout}-{dim}", layout=layout, shape=(2, 1, 19, dim))
        far = SinusoidalCase(f"{layout}-far", layout=layout, offset=99_999_990, scale=8.0)
        yield far
        yield replace(far, name=f"{layout}-negative", offset=-7, padding_idx=-3)
        yield replace(far, name=f"{layout}-timescale", max_timescale=500.0)
        for dims in ("l", "bl", "bhl"):
            case = SinusoidalCase(f"{layout}-positions-{dims}", layout=layout, positions=dims)
            yield replace(case, shape=(2, 3, 20, 37), padding_idx=1)
    for layout in memory.LAYOUTS:
        yield SinusoidalCase(f"memory-{layout}", memory=layout, shape=(2, 3, 20, 37), scale=0.5)
    for shape in ((0, 1, 3, 4), (1, 1, 0, 4), (1, 1, 3, 0), (1, 1, 1, 1), (1, 1, 3000, 96)):
        yield SinusoidalCase(f"shape-{'x'.join(map(str, shape))}", shape=shape)


SINUSOIDAL_CASES = tuple(_cases())


def _make(case: SinusoidalCase, dtype: torch.dtype) -> Operands:
    draw, normal = numbers_of(case.name)
    x = memory.place(normal(*case.shape).to(dtype), case.memory)
    positions = None
    if case.positions is not None:
        sizes = zip("bhl", case.shape, strict=False)
        shape = [size if dim in case.positions else 1 for dim, size in sizes]
        positions = torch.randint(-5, 10**8, shape, generator=draw)
        positions[..., ::4] = 1  # the padding index
    options = SinusoidalOptions(
        case.offset, case.layout, case.max_timescale, case.scale, case.padding_idx
    )
    return Operands("sinusoidal_encoding", {"x": x, "positions": positions}, options)


check_sinusoidal = Proof("sinusoidal_encoding", SINUSOIDAL_CASES, make=_make)
