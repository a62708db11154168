"""`LuongAttention`: the module of `luong_attention`, method general, on all keys."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import LuongAttention


class LuongModule(Module):
    FUNCTION = "nn.LuongAttention"
    ABOUT = "softmax(qᵀ W m) M, method general, on q [B, Lq, D], memory [B, Lk, D]"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256}
    SHAPES: ClassVar = {"query": "B Lq D", "memory": "B Lk D"}
    OUTPUT = "B Lq D"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        projection = 2 * cell["B"] * cell["Lq"] * cell["D"] ** 2
        return 4 * pairs * cell["D"] + projection, 10 * pairs * cell["D"] + 2 * projection

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return LuongAttention(cell["D"], **made)

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return draw.normal(
            *shape, scale=1 / shape[-1]
        )  # for scores of about 1, because they are not divided by √D

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(*self.leaves(inputs), need_weights=False)[0]
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, memory = self.leaves(inputs)
        return (softmax_of(query @ inputs["weight"] @ memory.mT) @ memory,)


OP = LuongModule()
