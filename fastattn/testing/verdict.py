"""Runs and judges one case of any operator on one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.testing.compare import Deviation, deviations
from fastattn.testing.draws import cached
from fastattn.testing.memory import Watch
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target, fresh_memory_is_nan

__all__ = ["AnyCase", "Proof", "Results", "Verdict", "fresh_memory_is_nan"]

Results = dict[str, Tensor]


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
        if results.keys() != exact.keys():
            self.faults.append(f"results {sorted(results)}, want {sorted(exact)}")
            return
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


@dataclass(frozen=True)
class Proof:
    """The cases of one operator, and how to make, run and judge them.

    The exact results are those of the reference in float64; for float64 candidates, those of
    ``testing.naive`` in extended precision, which needs NumPy.
    """

    operator: str
    cases: Sequence[AnyCase]
    make: Callable[[Any, torch.dtype], Any]  # the inputs of a case
    watched: Callable[[Any], Mapping[str, Tensor | None]]  # inputs that must not be modified
    # The primitive's tensors and options, for ``why_not``; None: any backend can run it.
    primitive: Callable[[Any], tuple[Sequence[Any], Any]] | None
    run: Callable[[Any, Any], Results]  # (backend, inputs) -> results by name
    definition: Callable[[Any], Results]  # the reference in float64
    # (``testing.naive``, inputs) -> results; None: the definition is exact enough.
    extended: Callable[[Any, Any], Results] | None = None
    extended_for: tuple[torch.dtype, ...] = (torch.float64,)
    public: bool = False  # `run` calls the public function, with the target's backend forced
    # The results whose dtype is not the judged one; those in `coarse` still have its eps.
    dtypes: Callable[[Any], Mapping[str, torch.dtype]] = lambda inputs: {}
    coarse: tuple[str, ...] = ()

    def __call__(self, case: Any, dtype: torch.dtype, target: Target) -> Verdict:
        """Run ``case`` on ``target``, forward and backward, and judge it by the error bound."""
        inputs, exact, noise = self.expected(case, dtype)
        verdict = Verdict()
        with target.active() as backend:
            if self.primitive is not None:
                tensors, options = self.primitive(inputs)
                verdict.declined = dispatch.reasons_of(backend, self.operator, tensors, options)
                if verdict.declined:
                    return verdict
            watch = Watch(**self.watched(inputs))
            results = target.results(self, backend, inputs)
        verdict.faults += [f"{name} was written to" for name in watch.written()]
        dtypes = {**dict.fromkeys(exact, dtype), **self.dtypes(inputs)}
        eps_of = dict.fromkeys(self.coarse, dtype)
        products = target.dtype_of_products(dtype)
        if products != dtype:
            noise = Noise(lambda: self.definition(inputs), exact, products)
            eps_of = dict.fromkeys(exact, products)
        verdict.judge(results, exact, noise, dtypes, eps_of)
        return verdict

    def expected(self, case: Any, dtype: torch.dtype) -> tuple[Any, Results, Noise]:
        """Return the inputs, the exact results, and their noise."""
        return _expected(self, case, dtype)


@cached
def _expected(proof: Proof, case: Any, dtype: torch.dtype) -> tuple[Any, Results, Noise]:
    inputs = proof.make(case, dtype)
    if proof.extended is not None and dtype in proof.extended_for:
        from fastattn.testing import naive  # which needs NumPy

        exact = proof.extended(naive, inputs)
    else:
        exact = proof.definition(inputs)
    return inputs, exact, Noise(lambda: proof.definition(inputs), exact, dtype)
