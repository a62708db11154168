"""`hopfield_retrieve`: ξ ← Xᵀ softmax(β X ξ), K steps, and then one more attention.

A step costs 4·D per query and stored pattern, as attention does; the backward repeats the steps. No
query stops early, so that all steps are counted and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastattn.bench.cells import Cell
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes
from fastattn.bench.ops.memory_hops import OP as MEMORY_HOPS


class Hopfield(Operator):
    FUNCTION = "hopfield_retrieve"
    ABOUT = (
        "ξ ← Xᵀ softmax(X ξ / √D), K steps and a readout, ξ [B, H, L, D], X [S, H, N, D]; S = 1 is "
        "shared"
    )
    SIZES: ClassVar[Sizes] = {"B": 4, "S": "B", "H": 8, "L": 128, "N": 128, "D": 64, "K": 3}
    SHAPES: ClassVar = {"state": "B H L D", "stored": "S H N D"}
    OUTPUT = "B H L D"

    def check(self, sizes: Mapping[str, int]) -> None:
        MEMORY_HOPS.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        attention = cell["B"] * cell["H"] * cell["L"] * cell["N"] * cell["D"] * (cell["K"] + 1)
        return 4 * attention, 10 * attention

    def scale(self, cell: Cell, name: str) -> float:
        # Small, so that the steps contract; diverging steps would amplify rounding errors.
        return 0.5

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.leaves(inputs), {"update_steps_max": cell["K"], "update_steps_eps": 0.0}

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        xi, stored = self.leaves(inputs)
        for _ in range(cell["K"] + 1):
            xi, _ = attend(xi, stored, stored)
        return (xi,)


OP = Hopfield()
