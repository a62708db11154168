"""The cases of ``merge_states`` and their proof.

The noise is that of the dtype that a result is computed in: 16-bit outputs are computed in float32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions
from fastattn.testing import memory
from fastattn.testing.calls import Operands
from fastattn.testing.cases import NamedCase, numbers_of
from fastattn.testing.judge import Proof

_INF = float("inf")


@dataclass(frozen=True)
class MergeCase(NamedCase):
    """One call of ``merge_states`` and of its backward, on outputs of ``shape`` [..., L, Dv]."""

    shape: tuple[int, ...] = (2, 3, 21, 20)
    spread: float = 2.0  # of lse
    apart: float = 0.0  # added to lse_b, and subtracted from it in every second row
    empty: tuple[str, ...] = ()  # states with empty rows: "a", "b", "both"
    infinite: tuple[str, ...] = ()  # states with rows of lse = inf
    poison: bool = False  # NaN and inf in the outputs of empty states
    lse_float64: bool = False
    lse_float32: bool = False  # of outputs in float64
    given: tuple[str, ...] = ("out", "lse")  # the results with a gradient
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the outputs
    lse_layout: str = "contiguous"
    grad_layout: str = "every_second"  # of the gradient of the output


_SHAPES = """
    5x8 7x33 130x64 3x9x16 2x2x2x5x24 1x2x200x128 2x1x3x530 1x1x1x1 0x3x4x5 2x3x0x5 2x3x4x0
"""


def _cases() -> Iterator[MergeCase]:
    base = MergeCase("plain")
    yield base
    for shape in _SHAPES.split():
        yield replace(base, name=f"shape-{shape}", shape=tuple(map(int, shape.split("x"))))
    for given in (("out",), ("lse",)):
        yield replace(base, name=f"given-{given[0]}", given=given, empty=("a", "both"))
    for empty in (("a",), ("b",), ("both",), ("a", "b", "both")):
        for poison in (False, True):
            name = f"empty-{'-'.join(empty)}{'-poison' if poison else ''}"
            yield replace(base, name=name, empty=empty, poison=poison)
    # Where both are, the derivative by lse has no meaning.
    yield replace(base, name="infinite", infinite=("a", "b"))
    yield replace(base, name="infinite-empty", empty=("a", "b"), infinite=("b", "a"), poison=True)
    yield replace(base, name="equal", spread=0.0)
    for apart in (12.0, 40.0, 1000.0, 1e30):
        yield replace(base, name=f"apart{apart:g}", apart=apart)
    yield replace(base, name="large", spread=1e4)
    yield replace(base, name="lse-float64", lse_float64=True, empty=("a", "b", "both"))
    yield replace(base, name="lse-float32", lse_float32=True, dtypes=(torch.float64,))
    for layout in memory.LAYOUTS:
        lse_layout = "unaligned" if layout == "contiguous" else layout
        case = replace(base, name=f"memory-{layout}", layouts=(layout, layout))
        yield replace(case, lse_layout=lse_layout, empty=("a", "b"))
    # lse in the layout of packed sequences, [Hq, T] for an output [T, Hq, D].
    yield replace(base, name="packed", shape=(1, 40, 3, 16), lse_layout="transposed_rows")
    mixed = replace(base, name="memory-mixed", layouts=("every_second", "blhd"))
    yield replace(mixed, lse_layout="sliced", poison=True, empty=("a", "both"))
    flattened = replace(base, name="memory-flattened", shape=(2, 2, 3, 5, 9), poison=True)
    yield replace(flattened, layouts=("packed", "transposed"), empty=("b",))
    contiguous = replace(base, grad_layout="contiguous")
    for width in (20, 24, 33):
        yield replace(contiguous, name=f"gradient-{width}", shape=(2, 3, 21, width))
    yield replace(base, name="long", shape=(1, 4, 700, 64), layouts=("blhd", "contiguous"))


MERGE_CASES = tuple(_cases())


class _Operands(Operands):
    def computed(self) -> dict[str, torch.dtype]:
        dtypes = [x.dtype for x in self.tensors.values() if x is not None]
        sums = torch.promote_types(dtypes[0], torch.float32)
        narrower = max((sums, dtypes[1]), key=lambda dtype: torch.finfo(dtype).eps)
        of_rows = {"lse": dtypes[1], "grad_lse_a": narrower, "grad_lse_b": narrower}
        return of_rows | dict.fromkeys(("out", "grad_out_a", "grad_out_b"), sums)

    def dtypes(self) -> dict[str, torch.dtype]:
        return super().dtypes() | {"lse": self.computed()["lse"]}


def make_merge(case: MergeCase, dtype: torch.dtype) -> Operands:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    _, normal = numbers_of(case.name)
    shape, rows = case.shape, case.shape[:-1]

    def placed_rows(values: Tensor) -> Tensor:
        if case.lse_layout == "transposed_rows":
            return memory.place_any(values.mT.contiguous()).mT
        return memory.place_any(values.unsqueeze(-1), case.lse_layout).squeeze(-1)

    is_double = dtype == torch.float64 and not case.lse_float32
    wide = torch.float64 if case.lse_float64 or is_double else torch.float32
    outs = [normal(*shape).to(dtype) for _ in range(2)]
    lses = [(case.spread * normal(*rows)).to(wide) for _ in range(2)]
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
        is_empty = placed == -_INF
        held = torch.where(is_empty[..., None], column, out) if case.poison else out
        tensors[f"out_{state}"] = held = memory.place_any(held, layout)
        tensors[f"lse_{state}"] = placed
        clean[f"out_{state}"] = torch.where(is_empty[..., None], 0.0, held)
    grads = {"out": memory.place_any(normal(*shape).to(dtype), case.grad_layout)}
    grads["lse"] = normal(*rows).to(wide)
    given = {name: grad if name in case.given else None for name, grad in grads.items()}
    return _Operands("merge_states", tensors, NoOptions(), given, clean=clean)


check_merge = Proof(
    "merge_states", MERGE_CASES, make=make_merge, coarse=("grad_lse_a", "grad_lse_b")
)
