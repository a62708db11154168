"""`MultiheadAttention`: self-attention with its four projections."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import visible_keys, with_weights
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._layers import multihead
from fastattn.bench.ops._module import Twin


class Mha(Twin):
    FUNCTION = "nn.MultiheadAttention"
    ABOUT = "self-attention of x [B, L, E] with H heads and its projections, batch_first"
    TORCH = "nn.MultiheadAttention, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 512, "E": 512, "H": 8}
    MASKS = ("none", "causal", "padding", "bool", "bias")
    WEIGHTS = ("none", "average", "per-head")
    SHAPES: ClassVar = {"x": "B L E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        # Three input projections and one output projection; each has two products in the backward.
        projections = 8 * cell["B"] * cell["L"] * cell["E"] ** 2
        return pairs * 4 * cell["E"] + projections, pairs * 10 * cell["E"] + 2 * projections

    def elements(self, cell: Cell) -> tuple[int, int]:
        tokens = cell["B"] * cell["L"] * cell["E"]
        return tokens + 4 * cell["E"] ** 2, tokens

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """In `key_padding_mask` and a boolean `attn_mask`, True is ignored."""
        inputs = super().inputs(cell, draw)
        if cell.mask == "bias":  # the module expects 3-D masks as [B·H, L, S]
            bias = draw.normal(cell["H"], cell["L"], cell["L"])
            inputs["attn_mask"] = bias.repeat(cell["B"], 1, 1)
        elif (visible := visible_keys(cell, draw)) is not None:
            if cell.mask == "padding":
                inputs["key_padding_mask"] = ~visible[:, 0]
            else:
                inputs["attn_mask"] = ~visible
        return inputs

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        module: nn.Module = library.MultiheadAttention(
            cell["E"], cell["H"], batch_first=True, **made
        )
        return module

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Outputs:
        x = inputs["x"]
        out, weights = module(
            x,
            x,
            x,
            key_padding_mask=inputs.get("key_padding_mask"),
            need_weights=cell.weights != "none",
            attn_mask=inputs.get("attn_mask"),
            average_attn_weights=cell.weights != "per-head",
            is_causal=cell.mask == "causal" and cell.weights == "none",
        )
        return (out,) if weights is None else (out, weights)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        x, visible, bias = inputs["x"], None, None
        if "key_padding_mask" in inputs:
            visible = ~inputs["key_padding_mask"][:, None, None, :]
        elif "attn_mask" in inputs and inputs["attn_mask"].dtype == torch.bool:
            visible = ~inputs["attn_mask"]
        elif "attn_mask" in inputs:
            bias = inputs["attn_mask"].unflatten(0, (-1, cell["H"]))
        return with_weights(cell, *multihead(inputs, x, x, cell["H"], visible, bias))


OP = Mha()
