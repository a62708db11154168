"""`HeadNetwork`: a feed-forward network of each head's own, after attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import HeadNetwork


class Heads(Module):
    FUNCTION = "nn.HeadNetwork"
    ABOUT = "W₂ relu(W₁ x + b₁) + b₂ of each head, x [B, H, L, D], F hidden units"
    TORCH = "the equation: torch has no such module"
    SIZES: ClassVar[Sizes] = {"B": 8, "H": 8, "L": 128, "D": 64, "F": 64}
    LEAVES = ("x", "weight1", "bias1", "weight2", "bias2")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward = 4 * cell["B"] * cell["H"] * cell["L"] * cell["D"] * cell["F"]
        return forward, 2 * forward

    def elements(self, cell: Cell) -> tuple[int, int]:
        out = cell["B"] * cell["H"] * cell["L"] * cell["D"]
        return out + self.parameters(cell), out

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return HeadNetwork(cell["H"], cell["D"], cell["F"], **made)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        shape = (cell["B"], cell["H"], cell["L"], cell["D"])
        return {"x": draw.normal(*shape), "grad_out": draw.normal(*shape)}

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        drawn = super().parameter(name, shape, draw)
        if name == "bias1":  # half of the units far below 0, half far above
            # The gradient of a ReLU jumps at 0, where rounding alone would decide the result.
            drawn = drawn + 8 * (2 * (torch.arange(shape[-1]) % 2) - 1)
        return drawn

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["x"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        x, weight1, bias1, weight2, bias2 = self.leaves(inputs)
        hidden = (x @ weight1.mT + bias1[:, None]).relu()
        return (hidden @ weight2.mT + bias2[:, None],)


OP = Heads()
