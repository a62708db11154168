"""`TransformerDecoderLayer`: causal self-attention, attention to a memory, feed-forward.

It uses GELU, for the reason in encoder_layer.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, Sizes
from fastattn.bench.ops._layers import decoder_layer
from fastattn.bench.ops._module import Twin
from fastattn.bench.ops.encoder_layer import OPTIONS


class DecoderLayer(Twin):
    FUNCTION = "nn.TransformerDecoderLayer"
    ABOUT = "a causal post-norm layer with GELU on x [B, L, E] and memory [B, S, E], batch_first"
    TORCH = "nn.TransformerDecoderLayer, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}
    SHAPES: ClassVar = {"x": "B L E", "memory": "B S E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, length, source, embed = (cell[key] for key in ("B", "L", "S", "E"))
        products = 12 * length * embed**2 + 4 * source * embed**2  # the projections of both
        products = batch * (products + 4 * length * embed * cell["F"])
        pairs = batch * (length * (length + 1) // 2 + length * source)
        return products + 4 * pairs * embed, 2 * products + 10 * pairs * embed

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        sizes = cell["E"], cell["H"], cell["F"]
        module: nn.Module = library.TransformerDecoderLayer(*sizes, **OPTIONS, **made)
        return module

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        mask = inputs.get("tgt_mask")
        out: Tensor = module(inputs["x"], inputs["memory"], tgt_mask=mask, tgt_is_causal=True)
        return out

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        mask = ~earlier(cell["L"], inputs["grad_out"].device)  # PyTorch needs the mask too
        return super().theirs(cell, inputs | {"tgt_mask": mask})

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        x, memory = inputs["x"], inputs["memory"]
        return (decoder_layer(inputs, x, memory, cell["H"], earlier(cell["L"], x.device)),)


def earlier(length: int, device: torch.device) -> Tensor:
    """[L, L], True for the keys up to the query's own."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


OP = DecoderLayer()
