"""The check before the timing: every result is compared with plain PyTorch in fp64.

The bound is that of the library (docs/numerics.md). ref is the same computation in fp64, noise is
the change of it by rounding to the dtype of the cell:

    max|x − ref|  ≤  4·noise + eps(dtype)·max|ref|

An operator may compare a random sample of a long cell; the result file records its size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import TORCH_DTYPES, make_inputs
from fastattn.bench.results import Outcome
from fastattn.testing.judge import deviations
from fastattn.testing.rounding import Noise

Outputs = dict[str, Tensor]


class Oracle:
    """The expected outputs of one cell, computed once for all providers."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.op = ops.get(cell.op)
        self.inputs = make_inputs(cell, seed)
        self.parts = self.op.parts(cell, seed)
        self.compared = self.op.coverage(cell, self.parts)
        self.reference = self._expected(self.parts)
        # Rounding affects all parts alike, and simulating it is slow.
        few = self.op.parts(cell, seed, few=True)
        of_few = self.reference if few == self.parts else self._expected(few)
        dtype = TORCH_DTYPES[cell.dtype]
        self.noise = Noise(functools.partial(self._expected, few), of_few, dtype)

    def check(self, outputs: Outputs) -> Outcome:
        """Compares all outputs; has the error of the one with the largest ratio to its bound."""
        dtype = TORCH_DTYPES[self.cell.dtype]
        unjudged = self.op.unjudged(self.cell)
        sampled = {n: self._sample(n, whole) for n, whole in outputs.items() if n not in unjudged}
        for name, got in sampled.items():
            want, wanted = self.reference[name], self.op.dtype_of(name, dtype)
            if got.shape != want.shape or got.dtype != wanted:
                reason = (
                    f"{name} is {got.dtype} {list(got.shape)}, expected {wanted} {list(want.shape)}"
                )
                return Outcome("WRONG", reason, float("inf"), 0.0, 1.0, name, self.compared)
        if not sampled:
            return Outcome("ok", "", 0.0, 0.0, 1.0, "", self.compared)
        worst = max(
            deviations(sampled, self.reference, self.noise), key=lambda deviation: deviation.ratio
        )
        want = self.reference[worst.name]
        return Outcome(
            status="ok" if worst.ok else "WRONG",
            reason="" if worst.ok else str(worst),
            max_error=worst.error,
            bound=worst.bound,
            largest=float(want.abs().max()) if want.numel() else 1.0,
            worst_tensor=worst.name,
            compared=self.compared,
        )

    def _expected(self, parts: list[tuple[int, ...]]) -> Outputs:
        found = []
        for where in parts:
            taken = {n: self.op.part(self.cell, n, x, where) for n, x in self.inputs.items()}
            found.append(self.op.expected(self.cell, self.op.in_double(taken)))
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def _sample(self, name: str, whole: Tensor) -> Tensor:
        parts = [self.op.part(self.cell, name, whole, where) for where in self.parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
