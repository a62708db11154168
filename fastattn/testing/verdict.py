"""Runs and judges one case of any operator on one target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.testing.calls import AnyInputs, Results
from fastattn.testing.compare import Deviation, deviations
from fastattn.testing.draws import cached
from fastattn.testing.memory import Watch
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target, fresh_memory_is_nan

__all__ = ["EXTENDED", "AnyCase", "Proof", "Results", "Verdict", "fresh_memory_is_nan"]


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

    @property
    def severity(self) -> float:
        """The worst error / bound; inf for any other fault."""
        errors = {str(d) for d in self.deviations}
        return self.ratio if errors.issuperset(self.faults) else float("inf")

    def judge(
        self,
        results: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        noise: Noise,
        dtypes: Mapping[str, torch.dtype],
        eps_of: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Record the deviations and the faults of ``results``.

        ``dtypes`` are their required dtypes; ``eps_of`` has the coarser dtypes that some of them
        were computed in.
        """
        comparable = {}
        for name, want in exact.items():
            x = results[name]
            if x.dtype != dtypes[name] or x.shape != want.shape:
                wanted = f"{dtypes[name]} {list(want.shape)}"
                self.faults.append(f"{name} is {x.dtype} {list(x.shape)}, want {wanted}")
            else:
                comparable[name] = x
        found = deviations(comparable, exact, noise, eps_of)
        self.deviations += found
        self.faults += [str(d) for d in found if not d.ok]


class AnyCase(Protocol):
    """A case of any operator."""

    @property
    def name(self) -> str: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def slow(self) -> bool: ...


# Results that are more exact than those of the definition in float64, by operator and dtype. The
# tests of the project have some, for dtypes that are as exact as the definition.
EXTENDED: dict[tuple[str, torch.dtype], Callable[[Any], Results]] = {}


@dataclass(frozen=True)
class Proof:
    """The cases of one operator, and how to make, run and judge them.

    The exact results are those of the definition, the reference in float64. Its own rounding errors
    are no larger than those of a candidate in float64, and as the bound is twice the error of right
    results, it covers both.
    """

    operator: str
    cases: Sequence[AnyCase]
    make: Callable[[Any, torch.dtype], Any]  # the inputs of a case, see calls.AnyInputs
    public: bool = False  # the inputs call the public function, with the target's backend forced
    # The results with the eps of the dtype that they are computed in, not of their own.
    coarse: tuple[str, ...] = ()

    def __call__(self, case: Any, dtype: torch.dtype, target: Target) -> Verdict:
        """Run ``case`` on ``target``, forward and backward, and judge it by the error bound."""
        inputs: AnyInputs = self.made(case, dtype)
        verdict = Verdict()
        with target.active() as backend:
            primitive = inputs.primitive()
            if primitive is not None:
                verdict.declined = dispatch.reasons_of(backend, self.operator, *primitive)
                if verdict.declined:
                    return verdict
            watch = Watch(**inputs.watched())
            results = target.results(self, backend, inputs)
        verdict.faults += [f"{name} was written to" for name in watch.written()]
        self.judge(verdict, case, dtype, results, target.dtype_of_products(dtype))
        return verdict

    def judge(
        self,
        verdict: Verdict,
        case: Any,
        dtype: torch.dtype,
        results: Results,
        products: torch.dtype,
    ) -> None:
        """Compare each result by the noise of the dtype that it is computed in."""
        inputs: AnyInputs
        inputs, exact, noise_of = self.expected(case, dtype)
        if results.keys() != exact.keys():
            verdict.faults.append(f"results {sorted(results)}, want {sorted(exact)}")
            return
        computed = dict.fromkeys(exact, dtype) | inputs.computed()
        coarse = self.coarse
        if products != dtype:
            computed, coarse = dict.fromkeys(exact, products), tuple(exact)
        required = {**dict.fromkeys(exact, dtype), **inputs.dtypes()}
        for each in dict.fromkeys(computed.values()):
            names = tuple(name for name in exact if computed[name] == each)
            wanted = {name: exact[name] for name in names}
            eps_of = {name: each for name in names if name in coarse}
            of_names = {name: results[name] for name in names}
            verdict.judge(of_names, wanted, noise_of(each, names), required, eps_of)

    def made(self, case: Any, dtype: torch.dtype) -> Any:
        return self.expected(case, dtype)[0]

    def expected(
        self, case: Any, dtype: torch.dtype
    ) -> tuple[Any, Results, Callable[[torch.dtype, tuple[str, ...]], Noise]]:
        """Return the inputs, the exact results, and the noise of some of them in a dtype."""
        return _expected(self, case, dtype)


@cached
def _expected(
    proof: Proof, case: Any, dtype: torch.dtype
) -> tuple[Any, Results, Callable[[torch.dtype, tuple[str, ...]], Noise]]:
    inputs = proof.make(case, dtype)
    extended = EXTENDED.get((proof.operator, dtype))
    exact = inputs.definition() if extended is None else extended(inputs)

    @functools.cache
    def noise_of(computed: torch.dtype, names: tuple[str, ...]) -> Noise:
        def definition() -> Results:
            results = inputs.definition()
            return {name: x for name, x in results.items() if name in names or name not in exact}

        return Noise(definition, {name: exact[name] for name in names}, computed)

    return inputs, exact, noise_of
