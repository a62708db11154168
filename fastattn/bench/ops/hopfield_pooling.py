"""`HopfieldPooling`: `Hopfield` with L learned states; each bag of N patterns gives one row."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import below
from fastattn.bench.ops.hopfield_module import (
    FIXED_STEPS,
    HopfieldModule,
    associated,
)
from fastattn.nn import HopfieldPooling


class Pooling(HopfieldModule):
    FUNCTION = "nn.HopfieldPooling"
    ABOUT = "L learned states retrieve from bags of patterns [B, N, E], H heads, K steps"
    SIZES: ClassVar[Sizes] = {"B": 32, "L": 1, "N": 128, "E": 512, "H": 8, "K": 3}
    SHAPES: ClassVar = {"stored": "B N E"}
    OUTPUT = "B L*E"

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        steps: dict[str, Any] = {"update_steps_max": cell["K"], **FIXED_STEPS}
        more: dict[str, Any] = {"num_heads": cell["H"], "quantity": cell["L"]}
        return HopfieldPooling(cell["E"], **more, **steps, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["stored"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        states = inputs["pooling_weights"].expand(cell["B"], -1, -1)
        own = below(inputs, "hopfield.")
        return (associated(cell, inputs["stored"], states, own).flatten(1),)


OP = Pooling()
