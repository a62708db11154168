"""The cases of ``merge_states`` and their proof.

The noise is that of the dtype that a result is computed in: 16-bit outputs are computed in float32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import NoOptions
from fastattn.testing import memory
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import cached, numbers_of
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Proof, Verdict

__all__ = ["MERGE_CASES", "MergeCase", "MergeInputs", "check_merge", "make_merge"]

_STATES = ("out_a", "lse_a", "out_b", "lse_b")
_INF = float("inf")


@dataclass(frozen=True)
class MergeCase:
    """One call of ``merge_states`` and of its backward, on outputs of ``shape`` [..., L, Dv]."""

    name: str
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
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False

    def lse_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.lse_float64 or (dtype == torch.float64 and not self.lse_float32):
            return torch.float64
        return torch.float32


def _cases() -> Iterator[MergeCase]:
    base = MergeCase("plain")
    yield base
    for shape in (
        (5, 8),
        (7, 33),
        (130, 64),
        (3, 9, 16),
        (2, 2, 2, 5, 24),
        (1, 2, 200, 128),
        (2, 1, 3, 530),
        (1, 1, 1, 1),
        (0, 3, 4, 5),
        (2, 3, 0, 5),
        (2, 3, 4, 0),
    ):
        yield replace(base, name=f"shape-{'x'.join(map(str, shape))}", shape=shape)
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


@dataclass(frozen=True)
class MergeInputs:
    """The primitive's arguments, and the states without NaN, for the judge."""

    states: tuple[Tensor, ...]
    clean: tuple[Tensor, ...]
    given: tuple[Tensor | None, Tensor | None]  # the gradients of out and lse


def make_merge(case: MergeCase, dtype: torch.dtype, *, fence: bool = False) -> MergeInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    _, normal = numbers_of(case.name)
    shape, rows = case.shape, case.shape[:-1]

    def placed(values: Tensor, layout: str) -> Tensor:
        missing = 4 - values.ndim
        full = values[(None,) * missing] if missing >= 0 else values.flatten(0, -4)
        view = memory.place(full, layout, fence=fence)
        return view[(0,) * missing] if missing >= 0 else view.unflatten(0, shape[:-3])

    def placed_rows(values: Tensor) -> Tensor:
        if case.lse_layout == "transposed_rows":
            return placed(values.mT.contiguous(), "contiguous").mT
        return placed(values.unsqueeze(-1), case.lse_layout).squeeze(-1)

    wide = case.lse_dtype(dtype)
    outs = [normal(*shape).to(dtype) for _ in range(2)]
    lses = [(case.spread * normal(*rows)).to(wide) for _ in range(2)]
    numbers = torch.arange(lses[0].numel()).view(rows)
    lses[1] += case.apart * (1 - 2 * (numbers % 2))
    for n, (name, value) in enumerate(
        [*((x, -_INF) for x in case.empty), *((x, _INF) for x in case.infinite)]
    ):
        chosen = numbers % 6 == n
        for lse, state in zip(lses, ("a", "b"), strict=True):
            if name in (state, "both"):
                lse[chosen] = value
    kinds = torch.tensor([torch.nan, _INF, -_INF], dtype=dtype)
    column = kinds[torch.arange(shape[-1]) % 3]
    states, clean = [], []
    for out, lse, layout in zip(outs, lses, case.layouts, strict=True):
        placed_lse = placed_rows(lse)
        is_empty = (placed_lse == -_INF)[..., None]
        held = placed(torch.where(is_empty, column, out) if case.poison else out, layout)
        states += [held, placed_lse]
        clean += [torch.where(is_empty, 0.0, held), placed_lse]
    grads = placed(normal(*shape).to(dtype), case.grad_layout), normal(*rows).to(wide)
    given = tuple(
        g if n in case.given else None for g, n in zip(grads, ("out", "lse"), strict=True)
    )
    return MergeInputs(tuple(states), tuple(clean), (given[0], given[1]))


def run_merge(backend: Any, inputs: MergeInputs) -> dict[str, Tensor]:
    """Run the primitive of a backend, forward and backward."""
    out, lse = backend.merge_states(*inputs.states, options=NoOptions())
    grads = backend.merge_states_backward(*inputs.given, *inputs.states, options=NoOptions())
    names = [f"grad_{name}" for name in _STATES]
    return {"out": out, "lse": lse} | dict(zip(names, grads, strict=True))


def define_merge(inputs: MergeInputs) -> dict[str, Tensor]:
    """Return the results of the reference in float64."""
    return run_merge(reference, _clean(inputs))


def _clean(inputs: MergeInputs) -> MergeInputs:
    states = tuple(x.double() for x in inputs.clean)
    given = tuple(None if x is None else x.double() for x in inputs.given)
    return MergeInputs(states, states, (given[0], given[1]))


_OF_OUTPUTS = ("out", "grad_out_a", "grad_out_b")
_OF_ROWS = ("lse",)
_OF_SUMS = ("grad_lse_a", "grad_lse_b")  # sums over a row, times weights


class _MergeProof(Proof):
    """Judges each result by the dtype that it is computed in."""

    def __call__(self, case: Any, dtype: torch.dtype, target: Target) -> Verdict:
        inputs, exact, _ = self.expected(case, dtype)
        verdict = Verdict()
        with target.active() as backend:
            tensors = dict(zip(_STATES, inputs.states, strict=True))
            verdict.declined = list(backend.why_not("merge_states", tensors, NoOptions()))
            if verdict.declined:
                return verdict
            watch = memory.Watch(**self.watched(inputs))
            results = target.results(self, backend, inputs)
        verdict.faults += [f"{name} was written to" for name in watch.written()]
        wide, sums = case.lse_dtype(dtype), torch.promote_types(dtype, torch.float32)
        narrower = max((sums, wide), key=lambda d: torch.finfo(d).eps)
        for names, computed, rounded in (
            (_OF_OUTPUTS, sums, dtype),
            (_OF_ROWS, wide, wide),
            (_OF_SUMS, narrower, narrower),
        ):
            wanted = {name: exact[name] for name in names}
            found = {name: results[name] for name in names}
            dtypes = dict.fromkeys(names, dtype if names is _OF_OUTPUTS else wide)
            noise = _noise(case, dtype, names, computed)
            verdict.judge(found, wanted, noise, dtypes, dict.fromkeys(names, rounded))
        return verdict


@cached
def _noise(
    case: MergeCase, dtype: torch.dtype, names: tuple[str, ...], computed: torch.dtype
) -> Noise:
    inputs, exact, _ = check_merge.expected(case, dtype)

    def definition() -> dict[str, Tensor]:
        results = define_merge(inputs)
        return {name: results[name] for name in names}

    return Noise(definition, {name: exact[name] for name in names}, computed)


check_merge = _MergeProof(
    "merge_states",
    MERGE_CASES,
    make=make_merge,
    watched=lambda inputs: {
        **dict(zip(_STATES, inputs.states, strict=True)),
        "grad_out": inputs.given[0],
        "grad_lse": inputs.given[1],
    },
    primitive=lambda inputs: (inputs.states, NoOptions()),
    run=run_merge,
    definition=define_merge,
    extended=lambda naive, inputs: run_merge(naive, _clean(inputs)),
)
