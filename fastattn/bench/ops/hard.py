"""`hard_attention`: each query selects one key.

It selects the most probable key instead of a random one, because two computations must agree. Every
query is close to one key, so that rounding does not decide. The score of a pair costs 2·D. The
backward is that of soft attention without the product with the values, whose rows are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes


class Hard(Operator):
    FUNCTION = "hard_attention"
    ABOUT = "V of the key with the largest q·k, straight_through, [B, H, Lq, D], [B, H, Lk, D]"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 8, "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"}
    SHAPES: ClassVar = {"query": "B H Lq D", "key": "B H Lk D", "value": "B H Lk Dv"}
    OUTPUT = "B H Lq Dv"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs *= cell["H"]
        return pairs * 2 * cell["D"], pairs * (6 * cell["D"] + 2 * cell["Dv"])

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        wanted = draw.integers(0, cell["Lk"], cell["Lq"])
        toward = 4 * cell["D"] ** -0.5  # a score of about 4; other scores are about 0
        query = inputs["key"][:, :, wanted] * toward + 0.1 * inputs["query"]
        return inputs | {"query": query.to(draw.dtype)}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.leaves(inputs), {"estimator": "straight_through", "deterministic": True}

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value = self.leaves(inputs)
        mean, weights = attend(query, key, value.detach())
        chosen = weights.argmax(-1, keepdim=True)
        out = value.gather(-2, chosen.expand(*chosen.shape[:-1], cell["Dv"]))
        # The value of `out` with the derivative of `mean`.
        return (out + (mean - mean.detach()) if torch.is_grad_enabled() else out,)


OP = Hard()
