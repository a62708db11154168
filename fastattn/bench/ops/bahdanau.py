"""`BahdanauAttention`: additive attention with its two projections."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.additive import OP as ADDITIVE
from fastattn.nn import BahdanauAttention


class Bahdanau(Operator):
    FUNCTION = "nn.BahdanauAttention"
    ABOUT = "softmax(v·tanh(W q + U m)) M on [B, Lq, E], memory [B, Lk, E], A units"
    TORCH = "the equation: torch has no such module"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256}
    LEAVES = ("query", "memory", "query_layer", "memory_layer", "v")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        units, width = cell["A"], cell["E"]
        projections = 2 * cell["B"] * (cell["Lq"] + cell["Lk"]) * width * units
        forward = pairs * (4 * units + 2 * width) + projections
        return forward, pairs * (8 * units + 4 * width) + 2 * projections

    def elements(self, cell: Cell) -> tuple[int, int]:
        tokens, out = cell["B"] * (cell["Lq"] + cell["Lk"]), cell["B"] * cell["Lq"]
        return tokens * cell["E"] + 2 * cell["E"] * cell["A"] + cell["A"], out * cell["E"]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, width, units = cell["B"], cell["E"], cell["A"]
        return {
            "query": draw.normal(batch, cell["Lq"], width),
            "memory": draw.normal(batch, cell["Lk"], width),
            "query_layer": draw.normal(units, width, scale=width**-0.5),
            "memory_layer": draw.normal(units, width, scale=width**-0.5),
            "v": draw.normal(units, scale=units**-0.5),
            "grad_out": draw.normal(batch, cell["Lq"], width),
        }

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, memory, w, u, v = self.leaves(inputs)
        width = cell["E"]
        module = BahdanauAttention(
            cell["A"], query_size=width, memory_size=width, dtype=v.dtype, device=v.device
        )
        for holder, name, value in (
            (module.query_layer, "weight", w),
            (module.memory_layer, "weight", u),
            (module, "v", v),
        ):
            setattr(holder, name, nn.Parameter(value))

        def forward() -> Outputs:
            return (module(query, memory, need_weights=False)[0],)

        parameters = (module.query_layer.weight, module.memory_layer.weight, module.v)
        return forward, [query, memory, *parameters]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return ADDITIVE.plain(cell, _projected(inputs))

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """The projections' gradients follow from those of additive attention."""
        wanted = cell.passes != "fwd"
        leaves = {name: inputs[name].clone().requires_grad_(wanted) for name in self.LEAVES}
        with torch.set_grad_enabled(wanted):
            projected = _projected(leaves)
        detached = {name: x.detach() for name, x in projected.items()}
        inner = ADDITIVE.expected(cell, detached | {"grad_out": inputs["grad_out"]})
        results = {"out": inner["out"]}
        if wanted:
            names = ("query", "key", "value", "v")
            torch.autograd.backward(
                [projected[name] for name in names], [inner[f"grad_{name}"] for name in names]
            )
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                results[f"grad_{name}"] = leaf.grad
        return results


def _projected(inputs: Inputs) -> Inputs:
    """The inputs of additive attention."""
    return {
        "query": inputs["query"] @ inputs["query_layer"].T,
        "key": inputs["memory"] @ inputs["memory_layer"].T,
        "value": inputs["memory"],
        "v": inputs["v"],
        "bias": inputs["v"].new_zeros(inputs["v"].shape),
    }


OP = Bahdanau()
