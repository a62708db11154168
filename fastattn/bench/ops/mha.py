"""`MultiheadAttention`: a layer's self-attention, with its four projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

import fastattn
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend, visible_keys, with_weights
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes

PARAMETERS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


class Mha(Operator):
    FUNCTION = "nn.MultiheadAttention"
    ABOUT = "self-attention of x [B, L, E] with H heads and its projections, batch_first"
    TORCH = "nn.MultiheadAttention, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 512, "E": 512, "H": 8}
    MASKS = ("none", "causal", "padding", "bool", "bias")
    WEIGHTS = ("none", "average", "per-head")
    LEAVES = ("x", *PARAMETERS)

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["E"] % sizes["H"]:
            raise ValueError(f"E={sizes['E']} is not a multiple of H={sizes['H']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        # Three input projections and one output projection; each has two products in the backward.
        projections = 8 * cell["B"] * cell["L"] * cell["E"] ** 2
        return pairs * 4 * cell["E"] + projections, pairs * 10 * cell["E"] + 2 * projections

    def elements(self, cell: Cell) -> tuple[int, int]:
        tokens = cell["B"] * cell["L"] * cell["E"]
        return tokens + 4 * cell["E"] ** 2, tokens

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """`key_padding_mask` and `attn_mask`: True is ignored, or added."""
        batch, length, embed = cell["B"], cell["L"], cell["E"]
        inputs = {
            "x": draw.normal(batch, length, embed),
            "grad_out": draw.normal(batch, length, embed),
            "in_proj_weight": draw.normal(3 * embed, embed, scale=embed**-0.5),
            "in_proj_bias": draw.normal(3 * embed, scale=0.1),
            "out_proj.weight": draw.normal(embed, embed, scale=embed**-0.5),
            "out_proj.bias": draw.normal(embed, scale=0.1),
        }
        if cell.mask == "bias":  # the module expects 3-D masks as [B·H, L, S]
            bias = draw.normal(cell["H"], length, length)
            inputs["attn_mask"] = bias.repeat(batch, 1, 1)
        elif (visible := visible_keys(cell, draw)) is not None:
            if cell.mask == "padding":
                inputs["key_padding_mask"] = ~visible[:, 0]
            else:
                inputs["attn_mask"] = ~visible
        return inputs

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return _prepare(fastattn.MultiheadAttention, cell, inputs)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return _prepare(nn.MultiheadAttention, cell, inputs)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        batch, length, embed = inputs["x"].shape
        visible, bias = None, None
        if "key_padding_mask" in inputs:
            visible = ~inputs["key_padding_mask"][:, None, None, :]
        elif "attn_mask" in inputs and inputs["attn_mask"].dtype == torch.bool:
            visible = ~inputs["attn_mask"]
        elif "attn_mask" in inputs:
            bias = inputs["attn_mask"].view(batch, cell["H"], length, length)

        def project(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
            return x @ weight.T + offset

        packed = project(inputs["x"], inputs["in_proj_weight"], inputs["in_proj_bias"])
        query, key, value = (
            part.view(batch, length, cell["H"], -1).transpose(1, 2)
            for part in packed.split(embed, -1)
        )
        heads, weights = attend(query, key, value, visible, bias)
        joined = heads.transpose(1, 2).reshape(batch, length, embed)
        out = project(joined, inputs["out_proj.weight"], inputs["out_proj.bias"])
        return with_weights(cell, out, weights)


def _prepare(kind: type[nn.MultiheadAttention], cell: Cell, inputs: Inputs) -> Prepared:
    """Self-attention: eval mode for the forward only, else training."""
    x = inputs["x"]
    module = kind(cell["E"], cell["H"], batch_first=True, dtype=x.dtype, device=x.device)
    module.load_state_dict({name: inputs[name] for name in PARAMETERS})
    module.train(cell.passes != "fwd")

    def forward() -> Outputs:
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

    parameters = dict(module.named_parameters())
    return forward, [x, *(parameters[name] for name in PARAMETERS)]


OP = Mha()
