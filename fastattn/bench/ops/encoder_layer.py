"""`TransformerEncoderLayer`: attention and feed-forward.

It uses GELU. The gradient of a ReLU is discontinuous at 0: rounding alone would decide the gradient
of hidden units near 0, and no bound could judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._layers import encoder_layer
from fastattn.bench.ops._module import Twin
from fastattn.bench.ops.mha import OP as MHA

# The options of all layers of Transformers here.
OPTIONS: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}


class EncoderLayer(Twin):
    FUNCTION = "nn.TransformerEncoderLayer"
    ABOUT = "a post-norm layer with GELU on x [B, L, E], H heads, F hidden units, batch_first"
    TORCH = "nn.TransformerEncoderLayer, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 128, "E": 512, "H": 8, "F": 2048}
    MASKS: ClassVar[Sequence[str]] = ("none", "padding")
    SHAPES: ClassVar = {"x": "B L E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = MHA.flops(cell, pairs)
        hidden = 4 * cell["B"] * cell["L"] * cell["E"] * cell["F"]
        return forward + hidden, backward + 2 * hidden

    def elements(self, cell: Cell) -> tuple[int, int]:
        inputs, outputs = MHA.elements(cell)
        return inputs + 2 * cell["E"] * cell["F"], outputs

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell.mask == "padding":
            inputs["key_padding_mask"] = ~draw.valid(cell["B"], cell["L"])
        return inputs

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        sizes = cell["E"], cell["H"], cell["F"]
        module: nn.Module = library.TransformerEncoderLayer(*sizes, **OPTIONS, **made)
        return module

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        padding = inputs.get("key_padding_mask")
        out: Tensor = module(inputs["x"], src_key_padding_mask=padding)
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        visible = None
        if "key_padding_mask" in inputs:
            visible = ~inputs["key_padding_mask"][:, None, None, :]
        return (encoder_layer(inputs, inputs["x"], cell["H"], visible),)


OP = EncoderLayer()
