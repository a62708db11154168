"""`memory_hop_attention`: u ← u + Cᵀ softmax(M u), K times.

In each hop, a query and a row of the memory cost 2·D for the score and 2·D for the readout; in the
backward 10·D, because the scores are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes


class MemoryHops(Operator):
    FUNCTION = "memory_hop_attention"
    ABOUT = "u ← u + Cᵀ softmax(M u), K hops, u [B, D], M and C [S, N, D]; S = 1 is shared"
    SIZES: ClassVar[Sizes] = {"B": 32, "S": "B", "N": 50, "D": 20, "K": 3}
    MASKS = ("none", "padding")
    WEIGHTS = ("none", "per-head")
    SHAPES: ClassVar = {"query": "B D", "in_memory": "S N D", "out_memory": "S N D"}
    OUTPUT = "B D"

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["S"] not in (1, sizes["B"]):
            raise ValueError(f"S={sizes['S']} must be 1 or B={sizes['B']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        work = cell["B"] * cell["K"] * cell["N"] * cell["D"]
        return 4 * work, 10 * work

    def scale(self, cell: Cell, name: str) -> float:
        return 1.0 if name == "query" else 0.1

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell.mask == "padding":
            inputs["memory_mask"] = draw.valid(cell["B"], cell["N"])
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.leaves(inputs), {
            "hops": cell["K"],
            "memory_mask": inputs.get("memory_mask"),
            "need_weights": cell.weights != "none",
        }

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        u, m, c = self.leaves(inputs)
        all_weights = []
        for _ in range(cell["K"]):
            shared = cell["S"] == 1
            scores = u @ m[0].T if shared else torch.bmm(m, u.unsqueeze(2)).squeeze(2)
            p = softmax_of(scores, inputs.get("memory_mask"))  # [B, N]
            read = p @ c[0] if shared else torch.bmm(p.unsqueeze(1), c).squeeze(1)
            u = u + read
            all_weights.append(p)
        return (u,) if cell.weights == "none" else (u, torch.stack(all_weights, 1))


OP = MemoryHops()
