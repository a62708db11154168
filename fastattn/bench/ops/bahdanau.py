"""`BahdanauAttention`: additive attention with its two projections."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs, Sizes, gradients
from fastattn.bench.ops._module import Module
from fastattn.bench.ops.additive import OP as ADDITIVE
from fastattn.nn import BahdanauAttention


class Bahdanau(Module):
    FUNCTION = "nn.BahdanauAttention"
    ABOUT = "softmax(v·tanh(W q + U m)) M on [B, Lq, E], memory [B, Lk, E], A units"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256}
    SHAPES: ClassVar = {"query": "B Lq E", "memory": "B Lk E"}
    OUTPUT = "B Lq E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        units, width = cell["A"], cell["E"]
        projections = 2 * cell["B"] * (cell["Lq"] + cell["Lk"]) * width * units
        forward = pairs * (4 * units + 2 * width) + projections
        return forward, pairs * (8 * units + 4 * width) + 2 * projections

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        width = cell["E"]
        return BahdanauAttention(cell["A"], query_size=width, memory_size=width, **made)

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return draw.normal(*shape, scale=shape[-1] ** -0.5)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(*self.leaves(inputs), need_weights=False)[0]
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return ADDITIVE.plain(cell, _projected(inputs))

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """The projections' gradients follow from those of additive attention."""
        leaves = self.fresh_leaves(cell, inputs)
        with torch.set_grad_enabled(cell.passes != "fwd"):
            projected = _projected(leaves)
        detached = {name: x.detach() for name, x in projected.items()}
        inner = ADDITIVE.expected(cell, detached | {"grad_out": inputs["grad_out"]})
        if cell.passes != "fwd":
            names = ("query", "key", "value", "v")
            torch.autograd.backward(
                [projected[name] for name in names], [inner[f"grad_{name}"] for name in names]
            )
        return {"out": inner["out"]} | gradients(leaves)


def _projected(inputs: Inputs) -> Inputs:
    """The inputs of additive attention."""
    return {
        "query": inputs["query"] @ inputs["query_layer.weight"].T,
        "key": inputs["memory"] @ inputs["memory_layer.weight"].T,
        "value": inputs["memory"],
        "v": inputs["v"],
        "bias": inputs["v"].new_zeros(inputs["v"].shape),
    }


OP = Bahdanau()
