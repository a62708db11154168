"""`HeadNetwork`: one feed-forward network per head, after attention."""

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
    SIZES: ClassVar[Sizes] = {"B": 8, "H": 8, "L": 128, "D": 64, "F": 64}
    SHAPES: ClassVar = {"x": "B H L D"}
    OUTPUT = "B H L D"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward = 4 * cell["B"] * cell["H"] * cell["L"] * cell["D"] * cell["F"]
        return forward, 2 * forward

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return HeadNetwork(cell["H"], cell["D"], cell["F"], **made)

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        drawn = super().parameter(name, shape, draw)
        if (
            name == "bias1"
        ):  # The gradient of a ReLU is discontinuous at 0, where rounding alone would decide it.
            # So half of the units are far below 0 and half far above.
            drawn = drawn + 8 * (2 * (torch.arange(shape[-1]) % 2) - 1)
        return drawn

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        hidden = (inputs["x"] @ inputs["weight1"].mT + inputs["bias1"][:, None]).relu()
        return (hidden @ inputs["weight2"].mT + inputs["bias2"][:, None],)


OP = Heads()
