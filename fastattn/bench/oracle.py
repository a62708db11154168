"""The check before the timing: every result is compared with plain PyTorch in fp64.

The bound is that of the library (docs/numerics.md). ref is the same computation in fp64, noise is
the change of it by rounding to the dtype of the cell:

    max|x − ref|  ≤  4·noise + eps(dtype)·max|ref|

An operator may compare a random sample of a long cell; the result file records its size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import TORCH_DTYPES, Cell, make_inputs
from fastattn.bench.ops import Part
from fastattn.bench.results import Outcome
from fastattn.testing.judge import deviations
from fastattn.testing.rounding import Noise

Outputs = dict[str, Tensor]


class Oracle:
    """The expected outputs of one cell, computed once for all providers."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.op, self.dtype = cell, ops.get(cell.op), TORCH_DTYPES[cell.dtype]
        self.inputs = make_inputs(cell, seed)
        self.parts = self.op.parts(cell, seed)
        self.compared = self.op.coverage(cell, self.parts)
        self.reference = self._expected(self.parts)
        # Rounding affects all parts alike, and simulating it is slow.
        few = self.op.parts(cell, seed, few=True)
        of_few = self.reference if few == self.parts else self._expected(few)
        self.noise = Noise(functools.partial(self._expected, few), of_few, self.dtype)

    def check(self, outputs: Outputs) -> Outcome:
        """Compares all outputs; has the error of the one with the largest ratio to its bound."""
        unjudged = self.op.unjudged(self.cell)
        judged = {name: x for name, x in outputs.items() if name not in unjudged}
        sampled = _joined([self.op.taken(self.cell, judged, part) for part in self.parts])
        for name, got in sampled.items():
            want, dtype = self.reference[name], self.op.dtype_of(name, self.dtype)
            if got.shape != want.shape or got.dtype != dtype:
                is_what = f"{got.dtype} {list(got.shape)}, expected {dtype} {list(want.shape)}"
                reason = f"{name} is {is_what}"
                return Outcome("WRONG", reason, float("inf"), 0.0, 1.0, name, self.compared)
        if not sampled:
            return Outcome("ok", "", 0.0, 0.0, 1.0, "", self.compared)
        found = deviations(sampled, self.reference, self.noise)
        worst = max(found, key=lambda deviation: deviation.ratio)
        want = self.reference[worst.name]
        largest = float(want.abs().max()) if want.numel() else 1.0
        status, reason = ("ok", "") if worst.ok else ("WRONG", str(worst))
        return Outcome(status, reason, worst.error, worst.bound, largest, worst.name, self.compared)

    def _expected(self, parts: Sequence[Part]) -> Outputs:
        taken = (ops.Inputs(self.op.taken(self.cell, self.inputs, part)) for part in parts)
        return _joined([self.op.expected(self.cell, self.op.in_double(x)) for x in taken])


def _joined(parts: Sequence[Outputs]) -> Outputs:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
