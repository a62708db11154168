"""The cases of ``merge_states`` and of ``sinusoidal_encoding``, their inputs and their proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn import sinusoids
from fastattn.backends.primitives import NoOptions, SinusoidalOptions
from fastattn.testing.calls import Operands
from fastattn.testing.cases import LAYOUTS, Draw, NamedCase, drawn, place
from fastattn.testing.judge import Proof

_INF = float("inf")


@dataclass(frozen=True)
class MergeCase(NamedCase):
    """One call of ``merge_states`` and of its backward, on outputs of ``shape`` [..., L, Dv]."""

    shape: tuple[int, ...] = (2, 3, 21, 20)
    spread: float = 2.0  # of lse
    apart: float = 0.0  # added to lse_b, and subtracted from it in every second row
    empty: tuple[str, ...] = ()  # states with empty rows: "a", "b", "both"
    infinite: tuple[str, ...] = ()  # states with rows of lse = inf, at different rows
    poison: bool = False  # NaN and inf in the outputs of empty states
    lse_dtype: torch.dtype | None = None  # None: of the sums
    grads: tuple[str, ...] = ("out", "lse")  # the results with a gradient
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the outputs
    lse_layout: str = "contiguous"
    grad_layout: str = "every_second"  # of the gradient of the output


_MERGE_SIZES: dict[str, Sequence[Any]] = {
    "shape": [
        *((5, 8), (7, 33), (130, 64), (3, 9, 16), (2, 2, 2, 5, 24), (1, 2, 200, 128), (1, 1, 1, 1)),
        *((2, 1, 3, 530), (0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (2, 2, 3, 5, 9)),
        *((2, 3, 21, width) for width in (20, 24, 33)),
    ],
    "grad_layout": ["every_second", "contiguous"],
}
_MERGE_OPTIONS: dict[str, Sequence[Any]] = {
    "grads": [("out",), ("lse",)] * 2,
    "empty poison": [
        (states, poison)
        for states in (("a",), ("b",), ("both",), ("a", "b", "both"), ("a", "both"))
        for poison in (False, True)
    ],
    "infinite": [("a", "b"), ("b", "a")],
    "spread": [0.0, 1e4],
    "apart": [12.0, 40.0, 1000.0, 1e30],
    "lse_dtype": [torch.float64] * 2,
    "lse_dtype dtypes": [(torch.float32, (torch.float64,))],
    "layouts lse_layout": [
        *(((x, x), "unaligned" if x == "contiguous" else x) for x in LAYOUTS),
        (("every_second", "blhd"), "sliced"),
        (("packed", "transposed"), "contiguous"),
    ],
}
MERGE_CASES = (
    MergeCase("plain"),
    MergeCase("long", (1, 4, 700, 64), layouts=("blhd", "contiguous")),
    # lse in the layout of packed sequences, [Hq, T] for an output [T, Hq, D].
    MergeCase("packed", (1, 40, 3, 16), lse_layout="transposed_rows"),
    *drawn(MergeCase("mixed"), 60, _MERGE_SIZES, _MERGE_OPTIONS),
)


class _MergeOperands(Operands):
    def computed(self) -> dict[str, torch.dtype]:
        dtypes = [x.dtype for x in self.tensors.values() if x is not None]
        sums = torch.promote_types(dtypes[0], torch.float32)
        narrower = max((sums, dtypes[1]), key=lambda dtype: torch.finfo(dtype).eps)
        of_rows = {"lse": dtypes[1], "grad_lse_a": narrower, "grad_lse_b": narrower}
        return of_rows | dict.fromkeys(("out", "grad_out_a", "grad_out_b"), sums)

    def dtypes(self) -> dict[str, torch.dtype]:
        return super().dtypes() | {"lse": self.computed()["lse"]}


def make_merge(case: MergeCase, dtype: torch.dtype) -> Operands:
    draw = Draw(case, dtype)
    shape, rows = case.shape, case.shape[:-1]
    wide = case.lse_dtype or draw.wide

    def placed_rows(values: Tensor) -> Tensor:
        if case.lse_layout == "transposed_rows":
            return place(values.mT.contiguous()).mT
        return place(values.unsqueeze(-1), case.lse_layout).squeeze(-1)

    outs = [draw.normal(*shape).to(dtype) for _ in range(2)]
    lses = [(case.spread * draw.normal(*rows)).to(wide) for _ in range(2)]
    numbers = torch.arange(lses[0].numel()).view(rows)
    lses[1] += case.apart * (1 - 2 * (numbers % 2))
    infinite = [*((x, -_INF) for x in case.empty), *((x, _INF) for x in case.infinite)]
    for n, (name, value) in enumerate(infinite):
        for lse, state in zip(lses, ("a", "b"), strict=True):
            if name in (state, "both"):
                lse[numbers % 6 == n] = value
    tensors: dict[str, Tensor | None] = {}
    clean = {}
    column = torch.tensor([torch.nan, _INF, -_INF], dtype=dtype)[torch.arange(shape[-1]) % 3]
    for state, out, lse, layout in zip("ab", outs, lses, case.layouts, strict=True):
        placed = placed_rows(lse)
        is_empty = placed[..., None] == -_INF
        held = draw.placed(torch.where(is_empty, column, out) if case.poison else out, layout)
        tensors |= {f"out_{state}": held, f"lse_{state}": placed}
        clean[f"out_{state}"] = torch.where(is_empty, 0.0, held)
    of_out, of_lse = draw.placed(draw.normal(*shape), case.grad_layout), draw.normal(*rows).to(wide)
    grads = {"out": of_out if "out" in case.grads else None}
    grads["lse"] = of_lse if "lse" in case.grads else None
    return _MergeOperands("merge_states", tensors, NoOptions(), grads, clean=clean)


check_merge = Proof(
    "merge_states", MERGE_CASES, make=make_merge, coarse=("grad_lse_a", "grad_lse_b")
)


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


_SINUSOIDAL_SIZES: dict[str, Sequence[Any]] = {
    "layout": sinusoids.LAYOUTS,
    "shape": [
        *((2, 1, 19, width) for width in (1, 2, 3, 7, 16, 33, 64, 100, 512, 1023)),
        *((2, 3, 20, 37), (1, 1, 3000, 96), (0, 1, 3, 4), (1, 1, 0, 4), (1, 1, 3, 0)),
    ],
}
_SINUSOIDAL_OPTIONS: dict[str, Sequence[Any]] = {
    "offset scale": [(99_999_990, 8.0), (99_999_990, 0.5)] * 2,
    "offset padding_idx": [(-7, -3)] * 4,
    "offset max_timescale": [(99_999_990, 500.0)] * 4,
    "positions padding_idx": [(dims, 1) for dims in ("l", "bl", "bhl")] * 4,
    "memory": list(LAYOUTS),
}


def _make_sinusoidal(case: SinusoidalCase, dtype: torch.dtype) -> Operands:
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
    (
        SinusoidalCase("plain"),
        *drawn(SinusoidalCase("mixed"), 80, _SINUSOIDAL_SIZES, _SINUSOIDAL_OPTIONS),
    ),
    make=_make_sinusoidal,
)
