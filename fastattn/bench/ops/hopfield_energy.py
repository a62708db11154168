"""`hopfield_energy`: the energy of every state, which retrieval minimizes.

E(ξ) = −lse(β X ξ) / β + ξ·ξ / 2 + (log N) / β + max |x|² / 2. The scores cost 2·D per pair. The
backward recomputes them, and multiplies their softmax by both sides.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from fastattn import hopfield_energy
from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class Energy(Operator):
    FUNCTION = "hopfield_energy"
    ABOUT = "−lse(β X ξ) / β + ξ·ξ / 2 + constants, β = 1 / √D, ξ [B, H, L, D], X [B, H, N, D]"
    SIZES: ClassVar[Sizes] = {"B": 4, "H": 8, "L": 128, "N": 128, "D": 64}
    SHAPES: ClassVar = {"state": "B H L D", "stored": "B H N D"}
    OUTPUT = "B H L"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        product = 2 * cell["B"] * cell["H"] * cell["L"] * cell["N"] * cell["D"]
        return product, 3 * product

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        state, stored = self.leaves(inputs)
        return lambda: (hopfield_energy(state, stored).to(state.dtype),), [state, stored]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        xi, stored = self.leaves(inputs)
        root = math.sqrt(cell["D"])  # 1 / beta
        scores = (xi @ stored.mT) / root
        lse = root * scores.logsumexp(-1)
        half = xi.square().sum(-1) / 2
        return (half - lse + _constants(stored, root),)


def _constants(stored: Tensor, root: float) -> Tensor:
    """The terms that do not depend on the state, [B, H, 1]; they pass no gradient."""
    longest = stored.detach().square().sum(-1).amax(-1, keepdim=True)
    return longest / 2 + root * math.log(stored.shape[-2])


OP = Energy()
