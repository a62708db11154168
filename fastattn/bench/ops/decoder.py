"""`TransformerDecoder`: the stack of six layers of Vaswani et al. 2017, causal, on a memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops._layers import decoder_layer
from fastattn.bench.ops._module import below
from fastattn.bench.ops.decoder_layer import DecoderLayer, earlier
from fastattn.bench.ops.encoder import LAYERS


class Decoder(DecoderLayer):
    FUNCTION = "nn.TransformerDecoder"
    ABOUT = f"{LAYERS} causal post-norm layers with GELU on x [B, L, E] and memory [B, S, E]"
    TORCH = "nn.TransformerDecoder, the same parameters"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        return LAYERS * forward, LAYERS * backward

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        layer = super().build(library, cell, **made)
        module: nn.Module = library.TransformerDecoder(layer, LAYERS)
        return module

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (decoded(inputs, inputs["x"], inputs["memory"], cell["H"]),)


def decoded(own: Inputs, x: Tensor, memory: Tensor, heads: int) -> Tensor:
    """x through all layers."""
    visible = earlier(x.shape[1], x.device)
    for n in range(LAYERS):
        x = decoder_layer(below(own, f"layers.{n}."), x, memory, heads, visible)
    return x


OP = Decoder()
