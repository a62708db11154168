"""`TransformerEncoder`: the stack of six layers of Vaswani et al. 2017."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops._layers import encoder_layer
from fastattn.bench.ops._module import below
from fastattn.bench.ops.encoder_layer import EncoderLayer

LAYERS = 6  # not a size, because each layer has its own parameters


class Encoder(EncoderLayer):
    FUNCTION = "nn.TransformerEncoder"
    ABOUT = f"{LAYERS} post-norm layers with GELU on x [B, L, E], H heads, F hidden units"
    TORCH = "nn.TransformerEncoder, the same parameters"
    MASKS = ("none",)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        return LAYERS * forward, LAYERS * backward

    def elements(self, cell: Cell) -> tuple[int, int]:
        inputs, outputs = super().elements(cell)
        return outputs + LAYERS * (inputs - outputs), outputs

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        layer = super().build(library, cell, **made)
        module: nn.Module = library.TransformerEncoder(layer, LAYERS)
        return module

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(inputs["x"])
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (encoded(inputs, inputs["x"], cell["H"]),)


def encoded(own: Inputs, x: Tensor, heads: int) -> Tensor:
    """x through all layers."""
    for n in range(LAYERS):
        x = encoder_layer(below(own, f"layers.{n}."), x, heads)
    return x


OP = Encoder()
