"""`LearnedPositionalEncoding`: x + weight[position], as in BERT."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import LearnedPositionalEncoding


class Learned(Module):
    FUNCTION = "nn.LearnedPositionalEncoding"
    ABOUT = "x + weight[position] on x [B, L, E], weight [L, E]"
    TORCH = "x + nn.Parameter[:L]"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 512, "E": 512}
    SHAPES: ClassVar = {"x": "B L E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        elements = cell["B"] * cell["L"] * cell["E"]
        return elements, elements

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return LearnedPositionalEncoding(cell["L"], cell["E"], **made)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (inputs["x"] + inputs["weight"],)


OP = Learned()
