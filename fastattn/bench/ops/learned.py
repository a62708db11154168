"""`LearnedPositionalEncoding`: x + weight[position], as BERT has it."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.nn import LearnedPositionalEncoding


class Learned(Operator):
    FUNCTION = "nn.LearnedPositionalEncoding"
    ABOUT = "x + weight[position] on x [B, L, E], weight [L, E]"
    TORCH = "x + nn.Parameter[:L]"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 512, "E": 512}
    LEAVES = ("x", "weight")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        elements = cell["B"] * cell["L"] * cell["E"]
        return elements, elements

    def elements(self, cell: Cell) -> tuple[int, int]:
        elements = cell["B"] * cell["L"] * cell["E"]
        return elements + cell["L"] * cell["E"], elements

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        shape = (cell["B"], cell["L"], cell["E"])
        return {
            "x": draw.normal(*shape),
            "weight": draw.normal(*shape[1:], scale=0.02),
            "grad_out": draw.normal(*shape),
        }

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        x, weight = self.leaves(inputs)
        module = LearnedPositionalEncoding(cell["L"], cell["E"], dtype=x.dtype, device=x.device)
        module.weight = nn.Parameter(weight)
        return lambda: (module(x),), [x, module.weight]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (inputs["x"] + inputs["weight"],)


OP = Learned()
