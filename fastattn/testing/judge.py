"""Runs and judges one case of any operator on one target, by the error bound of all tests:

    max|x - ref| <= 4 noise + eps max|ref|

ref is the operator on the same inputs in float64, noise the deviation of its definition by
rounding, eps the machine epsilon of the dtype in which x was computed. docs/numerics.md explains
the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.testing.calls import Results
from fastattn.testing.cases import NamedCase, Watch
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target

SAFETY = 4.0  # correct results stay below half of the bound, see docs/numerics.md
_CLEARLY_RIGHT = 0.5


@dataclass(frozen=True)
class Deviation:
    """The deviation of one result from the reference, and its worst element."""

    name: str
    error: float  # max|x - ref|; inf if exactly one of the two is finite
    bound: float
    shape: tuple[int, ...]
    worst: str = ""  # where it is, and how many elements deviate by more than the bound

    @property
    def ratio(self) -> float:
        """error / bound; at most 1 is correct."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else float("inf")

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.shape)}: max error {self.error:.3g} is {self.ratio:.3g} x the "
            f"bound {self.bound:.3g}; {self.worst}"
        )


def deviation(
    candidate: Tensor,
    reference: Tensor,
    noise: float,
    name: str = "x",
    dtype: torch.dtype | None = None,
) -> Deviation:
    """Measure ``candidate`` against the bound, with the eps of ``dtype`` (default: its own).

    If the reference is inf, -inf or NaN, the candidate must be equal to it. Raises ValueError for a
    wrong shape.
    """
    shape = tuple(reference.shape)
    if tuple(candidate.shape) != shape:
        raise ValueError(f"{name}: shape {list(candidate.shape)}, want {list(shape)}")
    if reference.numel() == 0:
        return Deviation(name, 0.0, 0.0, shape)
    x, r = candidate.detach().double(), reference.detach().double()
    finite = torch.isfinite(r)
    largest = float(r[finite].abs().max()) if finite.any() else 0.0
    bound = SAFETY * noise + torch.finfo(dtype or candidate.dtype).eps * largest
    same = (x == r) | (torch.isnan(x) & torch.isnan(r))
    comparable = finite & torch.isfinite(x)
    off = torch.where(comparable, (x - r).abs(), torch.where(same, 0.0, float("inf")))
    index = tuple(int(n) for n in torch.unravel_index(off.argmax(), shape))
    worst = f"worst at {list(index)}: got {x[index]:.9g}, want {r[index]:.9g}; "
    worst += f"{int((off > bound).sum())} of {off.numel()} elements are off"
    return Deviation(name, float(off[index]), bound, shape, worst)


def deviations(
    candidates: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    noise: Noise,
    eps_of: Mapping[str, torch.dtype] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[Deviation]:
    """Measure each candidate, or only the candidates with a wrong dtype or shape if there are any.

    ``eps_of`` has the dtype of eps if it is not the candidate's. The noise is drawn until all
    ratios are below one half, or as often as allowed; draws for earlier candidates are reused.
    """
    eps_of, measured = eps_of or {}, list[Deviation]()
    for name, dtype in (dtypes or {}).items():
        x, shape = candidates[name], exact[name].shape
        if x.dtype != dtype or x.shape != shape:
            wrong = f"got {x.dtype} {list(x.shape)}, want {dtype} {list(shape)}"
            measured.append(Deviation(name, float("inf"), 0.0, tuple(shape), wrong))
    if measured:
        return measured
    may_draw = noise.drawn > 0 or noise.draw()
    while may_draw or not measured:
        measured = [
            deviation(x, exact[name], noise.largest[name], name, eps_of.get(name))
            for name, x in candidates.items()
        ]
        if all(d.ratio <= _CLEARLY_RIGHT for d in measured):
            break
        may_draw = noise.draw()
    return measured


@dataclass
class Verdict:
    """The measured deviations, and all reasons why the case failed."""

    deviations: list[Deviation] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)  # the reasons why the backend cannot run it

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def ratio(self) -> float:
        """The worst error / bound."""
        return max((d.ratio for d in self.deviations), default=0.0)

    def add(self, measured: Sequence[Deviation]) -> None:
        """Record deviations, and which of them are faults."""
        self.deviations += measured
        self.faults += [str(d) for d in measured if not d.ok]


# Functions whose results are more exact than the definition in float64, by operator and dtype. The
# tests of the project register some, for dtypes that are as exact as the definition.
EXTENDED: dict[tuple[str, torch.dtype], Callable[[Any], Results]] = {}


@dataclass(frozen=True)
class Proof:
    """The cases of one operator, and how to make, run and judge them."""

    operator: str
    cases: Sequence[NamedCase]
    # The inputs of a case, calls.Operands or calls.Call, equal in every call, in poisoned memory.
    make: Callable[[Any, torch.dtype], Any]
    # The results whose eps is of the dtype in which they are computed.
    coarse: tuple[str, ...] = ()

    def __call__(self, case: Any, dtype: torch.dtype, target: Target) -> Verdict:
        """Run ``case`` on ``target``, forward and backward, and judge it by the error bound."""
        inputs = target.placed(self.expected(case, dtype)[0])
        verdict = Verdict()
        with target.active() as backend:
            primitive = inputs.primitive()
            if primitive is not None:
                verdict.declined = dispatch.reasons_against(backend, self.operator, *primitive)
                if verdict.declined:
                    return verdict
            watch = Watch(**inputs.watched())
            results = {name: x.cpu() for name, x in target.results(backend, inputs).items()}
        verdict.faults += [f"{name} was written to" for name in watch.written()]
        self.judge(verdict, case, dtype, results, target.dtype_of_products(dtype))
        return verdict

    def judge(
        self, verdict: Verdict, case: Any, dtype: torch.dtype, results: Results, products: Any
    ) -> None:
        """Compare each result, with the noise of the dtype in which it is computed."""
        inputs, exact, noise_of = self.expected(case, dtype)
        if results.keys() != exact.keys():
            verdict.faults.append(f"results {sorted(results)}, want {sorted(exact)}")
            return
        computed, coarse = dict.fromkeys(exact, dtype) | inputs.computed(), self.coarse
        if products != dtype:
            computed, coarse = dict.fromkeys(exact, products), tuple(exact)
        required = dict.fromkeys(exact, dtype) | inputs.dtypes()
        for each in dict.fromkeys(computed.values()):
            names = tuple(name for name in exact if computed[name] == each)
            candidates, some = ({name: of[name] for name in names} for of in (results, exact))
            eps_of = {name: each for name in names if name in coarse}
            kinds = {name: required[name] for name in names}
            verdict.add(deviations(candidates, some, noise_of(each, names), eps_of, kinds))

    @functools.lru_cache(maxsize=32)  # noqa: B019 (proofs live as long as the process)
    def expected(
        self, case: Any, dtype: torch.dtype
    ) -> tuple[Any, Results, Callable[[torch.dtype, tuple[str, ...]], Noise]]:
        """Return the inputs, the exact results, and the noise of some of them in a dtype."""
        inputs = self.make(case, dtype)
        exact = EXTENDED.get((self.operator, dtype), type(inputs).definition)(inputs)

        @functools.cache
        def noise_of(computed: torch.dtype, names: tuple[str, ...]) -> Noise:
            def definition() -> Results:
                every = inputs.definition()
                return {name: x for name, x in every.items() if name in names or name not in exact}

            return Noise(definition, {name: exact[name] for name in names}, computed)

        return inputs, exact, noise_of
