"""`TransformerDecoder`: the stack of six layers of Vaswani et al. 2017, causal, on a memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops.decoder_layer import PARAMETERS, DecoderLayer, later, layer
from fastattn.bench.ops.encoder import LAYERS
from fastattn.nn import TransformerDecoder, TransformerDecoderLayer

STACK = tuple(f"layers.{n}.{name}" for n in range(LAYERS) for name in PARAMETERS)


class Decoder(DecoderLayer):
    FUNCTION = "nn.TransformerDecoder"
    ABOUT = f"{LAYERS} causal post-norm layers with GELU on x [B, L, E] and memory [B, S, E]"
    TORCH = "nn.TransformerDecoder, the same parameters"
    LEAVES = ("x", "memory", *STACK)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        return LAYERS * forward, LAYERS * backward

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return TransformerDecoder(self.of(TransformerDecoderLayer, cell, made), LAYERS)

    def make_torch(self, cell: Cell, **made: Any) -> nn.Module:
        return nn.TransformerDecoder(self.of(nn.TransformerDecoderLayer, cell, made), LAYERS)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (decoded(cell, inputs, inputs["x"], inputs["memory"]),)


def decoded(cell: Cell, inputs: Inputs, x: Tensor, memory: Tensor) -> Tensor:
    """x through all layers; their parameters are among the inputs."""
    before = ~later(cell["L"], x.device)
    for n in range(LAYERS):
        own = {name: inputs[f"layers.{n}.{name}"] for name in PARAMETERS}
        x = layer(own, x, memory, before, cell["H"])
    return x


OP = Decoder()
