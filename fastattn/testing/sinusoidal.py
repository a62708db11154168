"""The cases of ``sinusoidal_encoding`` and their judge.

The judge is the reference in float64, whose positions and frequencies are exact; that they are is
tested in ``tests/ops/test_sinusoidal.py`` with 50 digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import LAYOUTS
from fastattn.testing import memory
from fastattn.testing.draws import generator_of
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Verdict, fresh_memory_is_nan

__all__ = ["SINUSOIDAL_CASES", "SinusoidalCase", "check_sinusoidal"]


@dataclass(frozen=True)
class SinusoidalCase:
    """One call of ``sinusoidal_encoding`` on x [B, H, L, D]."""

    name: str
    shape: tuple[int, int, int, int] = (2, 1, 33, 64)
    layout: str = "interleaved"
    offset: int = 0
    positions: str | None = None  # the dimensions of B, H, L that they have: "l", "bl", "bhl"
    max_timescale: float = 10000.0
    scale: float = 1.0
    padding_idx: int | None = None
    memory: str = "contiguous"
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    slow: bool = False


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


def check_sinusoidal(case: SinusoidalCase, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` on ``target`` and judge it by the error bound."""
    draw = generator_of(case.name)
    values = torch.randn(case.shape, generator=draw, dtype=torch.float64).to(dtype)
    x = memory.place(values, case.memory)
    positions = None
    if case.positions is not None:
        sizes = zip("bhl", case.shape, strict=False)
        shape = [size if dim in case.positions else 1 for dim, size in sizes]
        positions = torch.randint(-5, 10**8, shape, generator=draw)
        positions[..., ::4] = 1  # the padding index
    options = SinusoidalOptions(
        case.offset, case.layout, case.max_timescale, case.scale, case.padding_idx
    )
    verdict = Verdict()
    with target.active() as backend:
        verdict.declined = backend.why_not("sinusoidal_encoding", x, positions, options=options)
        if verdict.declined:
            return verdict
        watch = memory.Watch(x=x, positions=positions)
        with fresh_memory_is_nan():
            out = backend.sinusoidal_encoding(x, positions, options=options)
    verdict.faults += [f"{name} was written to" for name in watch.written()]

    def definition() -> dict[str, Tensor]:
        return {"out": reference.sinusoidal_encoding(x.double(), positions, options=options)}

    exact = definition()
    verdict.judge({"out": out}, exact, Noise(definition, exact, dtype), {"out": dtype})
    return verdict
