"""`AdditiveAttention`: Keras' layer, additive attention without projections."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import AdditiveAttention


class AdditiveModule(Module):
    FUNCTION = "nn.AdditiveAttention"
    ABOUT = "softmax(scale·tanh(q + m)) M on q [B, Lq, A], memory [B, Lk, A]"
    TORCH = "the equation: torch has no such module"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "A": 256}
    LEAVES = ("query", "memory", "scale")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 6 * pairs * cell["A"], 12 * pairs * cell["A"]  # as additive_attention, Dv = A

    def elements(self, cell: Cell) -> tuple[int, int]:
        out = cell["B"] * cell["Lq"] * cell["A"]
        return out + cell["B"] * cell["Lk"] * cell["A"] + cell["A"], out

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return AdditiveAttention(dim=cell["A"], **made)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        batch, units = cell["B"], cell["A"]
        return {
            "query": draw.normal(batch, cell["Lq"], units),
            "memory": draw.normal(batch, cell["Lk"], units),
            "grad_out": draw.normal(batch, cell["Lq"], units),
        }

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["query"], inputs["memory"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, memory, scale = self.leaves(inputs)
        hidden = (query[:, :, None] + memory[:, None]).tanh()  # [B, Lq, Lk, A]
        weights = softmax_of(hidden @ scale, None, None)
        return (weights @ memory,)


OP = AdditiveModule()
