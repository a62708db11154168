"""`HopfieldLayer`: `Hopfield` with N learned patterns, shared by the batch."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops._module import below
from fastattn.bench.ops.hopfield_module import (
    FIXED_STEPS,
    HopfieldModule,
    associated,
)
from fastattn.nn import HopfieldLayer


class Layer(HopfieldModule):
    FUNCTION = "nn.HopfieldLayer"
    ABOUT = "states [B, L, E] retrieve from N learned patterns, H heads, K steps"
    SHAPES: ClassVar = {"state": "B L E"}

    def copies(self, cell: Cell) -> int:
        return 1

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        steps: dict[str, Any] = {"update_steps_max": cell["K"], **FIXED_STEPS}
        more: dict[str, Any] = {"num_heads": cell["H"], "quantity": cell["N"]}
        return HopfieldLayer(cell["E"], **more, **steps, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["state"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        own = below(inputs, "hopfield.")
        return (associated(cell, inputs["lookup_weights"], inputs["state"], own),)


OP = Layer()
