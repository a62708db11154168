"""Judges one case on one target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn.testing import oracle
from fastattn.testing.cases import Case
from fastattn.testing.compare import Deviation, deviations
from fastattn.testing.draws import cached
from fastattn.testing.inputs import Inputs, make_inputs
from fastattn.testing.memory import Watch
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target

__all__ = ["Verdict", "check", "expected", "fresh_memory_is_nan"]


@dataclass
class Verdict:
    """Everything that was measured, and every reason why it is not right."""

    deviations: list[Deviation] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)  # why the backend would not run it

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def ratio(self) -> float:
        """The worst error / bound."""
        return max((d.ratio for d in self.deviations), default=0.0)

    @property
    def severity(self) -> float:
        """How clearly it is wrong: the worst error / bound, inf for any other fault."""
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
        """Note how far ``results`` are off, and what is wrong with them.

        ``dtypes`` are those that they must have; ``eps_of`` names the coarser dtypes that some were
        computed in.
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


def check(case: Case, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` forward and backward on ``target``: values, dtypes, and what it wrote to."""
    inputs, exact, noise = expected(case, dtype)
    verdict = Verdict()
    with target.active() as backend:
        reasons = backend.why_not(
            "scaled_dot_product_attention", *inputs.forward_args(), options=inputs.options
        )
        if reasons:
            verdict.declined = list(reasons)
            return verdict
        watch = Watch(**inputs.tensors())
        with fresh_memory_is_nan():
            results = oracle.run(backend, inputs)
    verdict.faults += [f"{name} was written to" for name in watch.written()]
    dtypes = {name: _dtype_of(name, inputs) for name in exact}
    # lse of 16-bit inputs is a sum of weights that were rounded to 16 bits.
    verdict.judge(results, exact, noise, dtypes, {"lse": dtype})
    return verdict


@cached
def expected(case: Case, dtype: torch.dtype) -> tuple[Inputs, dict[str, Tensor], Noise]:
    """Return the inputs, what they should give, and how far rounding alone moves that."""
    inputs = make_inputs(case, dtype)
    exact = oracle.exact(inputs)
    return inputs, exact, oracle.noise_of(inputs, exact)


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Within the block torch.empty gives NaN, so that an element that is never written shows."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # the filling is a part of this mode
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def _dtype_of(name: str, inputs: Inputs) -> torch.dtype:
    if name == "lse":
        return torch.promote_types(inputs.query.dtype, torch.float32)
    if name == "grad_mask":
        assert inputs.attn_mask is not None
        return inputs.attn_mask.dtype
    return inputs.query.dtype
