"""`merge_states`: merges attention over two sets of keys into attention over both.

It is memory bound: it reads two outputs and writes one, with 4 operations per element.
"""

from __future__ import annotations

from typing import ClassVar

import torch

import fastattn
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class MergeStates(Operator):
    FUNCTION = "merge_states"
    ABOUT = "(e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), [B, H, L, D], [B, H, L]"
    SIZES: ClassVar[Sizes] = {"B": 8, "H": 8, "L": 512, "D": 64}
    SHAPES: ClassVar = {
        "out_a": "B H L D",
        "lse_a": "B H L",
        "out_b": "B H L D",
        "lse_b": "B H L",
    }
    OUTPUT = "B H L D"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        elements = cell["B"] * cell["H"] * cell["L"] * cell["D"]
        return 4 * elements, 8 * elements

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        return {name: x.to(self.dtype_of(name, x.dtype)) for name, x in inputs.items()}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if "lse" in name else dtype

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        leaves = self.leaves(inputs)
        return lambda: fastattn.merge_states(*leaves)[:1], leaves  # only the output

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        out_a, lse_a, out_b, lse_b = self.leaves(inputs)
        a, b = torch.stack([lse_a, lse_b]).softmax(0)[..., None]
        return ((a * out_a + b * out_b).to(out_a.dtype),)


OP = MergeStates()
