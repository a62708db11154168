"""`HopfieldLayer`: `Hopfield` with N learned patterns, the same for every batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops.hopfield_module import (
    NEVER_RESTS,
    PARAMETERS,
    HopfieldModule,
    associated,
)
from fastattn.nn import HopfieldLayer

_OWN = tuple(f"hopfield.{name}" for name in PARAMETERS)


class Layer(HopfieldModule):
    FUNCTION = "nn.HopfieldLayer"
    ABOUT = "states [B, L, E] retrieve from N learned patterns, H heads, K steps"
    LEAVES = ("state", "lookup_weights", *_OWN)

    def copies(self, cell: Cell) -> int:
        return 1

    def elements(self, cell: Cell) -> tuple[int, int]:
        states = cell["B"] * cell["L"] * cell["E"]
        return states + self.parameters(cell), states

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        steps: dict[str, Any] = {"update_steps_max": cell["K"], **NEVER_RESTS}
        more: dict[str, Any] = {"num_heads": cell["H"], "quantity": cell["N"]}
        return HopfieldLayer(cell["E"], **more, **steps, **made)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        shape = (cell["B"], cell["L"], cell["E"])
        return {"state": draw.normal(*shape), "grad_out": draw.normal(*shape)}

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["state"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        parameters = [inputs[name] for name in _OWN]
        found = associated(cell, inputs["lookup_weights"], inputs["state"], parameters)
        return (found,)


OP = Layer()
