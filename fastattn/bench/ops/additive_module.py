"""`AdditiveAttention`: Keras' layer, additive attention without projections."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._attention import softmax_of
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import AdditiveAttention


class AdditiveModule(Module):
    FUNCTION = "nn.AdditiveAttention"
    ABOUT = "softmax(scale·tanh(q + m)) M on q [B, Lq, A], memory [B, Lk, A]"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "A": 256}
    SHAPES: ClassVar = {"query": "B Lq A", "memory": "B Lk A"}
    OUTPUT = "B Lq A"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 6 * pairs * cell["A"], 12 * pairs * cell["A"]  # as additive_attention, Dv = A

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return AdditiveAttention(dim=cell["A"], **made)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, memory = self.leaves(inputs)
        hidden = (query[:, :, None] + memory[:, None]).tanh()  # [B, Lq, Lk, A]
        weights = softmax_of(hidden @ inputs["scale"])
        return (weights @ memory,)


OP = AdditiveModule()
