"""`TransformerDecoderLayer`: causal self-attention, attention to a memory, feed-forward.

With GELU, for the reason that encoder_layer.py gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, Sizes
from fastattn.bench.ops._module import Module
from fastattn.bench.ops.mha import OP as MHA
from fastattn.bench.ops.mha import PARAMETERS as ATTENTION
from fastattn.nn import TransformerDecoderLayer

PARAMETERS = (
    *(f"self_attn.{name}" for name in ATTENTION),
    *(f"multihead_attn.{name}" for name in ATTENTION),
    *("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
    *(f"norm{n}.{name}" for n in (1, 2, 3) for name in ("weight", "bias")),
)


class DecoderLayer(Module):
    FUNCTION = "nn.TransformerDecoderLayer"
    ABOUT = "a causal post-norm layer with GELU on x [B, L, E] and memory [B, S, E], batch_first"
    TORCH = "nn.TransformerDecoderLayer, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}
    LEAVES = ("x", "memory", *PARAMETERS)

    def check(self, sizes: Mapping[str, int]) -> None:
        MHA.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, length, source, embed = (cell[key] for key in ("B", "L", "S", "E"))
        products = 12 * length * embed**2 + 4 * source * embed**2  # the projections of both
        products = batch * (products + 4 * length * embed * cell["F"])
        pairs = batch * (length * (length + 1) // 2 + length * source)
        return products + 4 * pairs * embed, 2 * products + 10 * pairs * embed

    def elements(self, cell: Cell) -> tuple[int, int]:
        out = cell["B"] * cell["L"] * cell["E"]
        return out + cell["B"] * cell["S"] * cell["E"] + self.parameters(cell), out

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        layer: nn.Module = self.of(TransformerDecoderLayer, cell, made)
        return layer

    def make_torch(self, cell: Cell, **made: Any) -> nn.Module:
        """PyTorch's own, with the same parameters."""
        layer: nn.Module = self.of(nn.TransformerDecoderLayer, cell, made)
        return layer

    def of(self, kind: Callable[..., Any], cell: Cell, made: dict[str, Any]) -> Any:
        """A layer of this kind, as every part of a stack has it."""
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        return kind(cell["E"], cell["H"], dim_feedforward=cell["F"], **options, **made)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        batch, embed = cell["B"], cell["E"]
        return {
            "x": draw.normal(batch, cell["L"], embed),
            "memory": draw.normal(batch, cell["S"], embed),
            "grad_out": draw.normal(batch, cell["L"], embed),
        }

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        mask = inputs.get("tgt_mask")
        out: Tensor = module(inputs["x"], inputs["memory"], tgt_mask=mask, tgt_is_causal=True)
        return out

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        mask = later(cell["L"], inputs["grad_out"].device)  # PyTorch also needs the matrix
        return self.prepared(self.make_torch, cell, inputs | {"tgt_mask": mask})

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        x, memory = inputs["x"], inputs["memory"]
        return (layer(inputs, x, memory, ~later(cell["L"], x.device), cell["H"]),)


def layer(own: Inputs, x: Tensor, memory: Tensor, before: Tensor, heads: int) -> Tensor:
    """The layer whose parameters are `own`; `before` [L, L] is True for what is not later."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight.T + bias

    def norm(n: int, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], own[f"norm{n}.weight"], own[f"norm{n}.bias"])

    def look(name: str, at: Tensor, visible: Tensor | None) -> Tensor:
        weights, biases = (own[f"{name}.in_proj_{kind}"].chunk(3) for kind in ("weight", "bias"))
        query, key, value = (
            linear(source, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
            for source, w, b in zip((x, at, at), weights, biases, strict=True)
        )
        joined = attend(query, key, value, visible, None)[0].transpose(1, 2).flatten(2)
        return linear(joined, own[f"{name}.out_proj.weight"], own[f"{name}.out_proj.bias"])

    x = norm(1, x + look("self_attn", x, before))
    x = norm(2, x + look("multihead_attn", memory, None))
    hidden = functional.gelu(linear(x, own["linear1.weight"], own["linear1.bias"]))
    return norm(3, x + linear(hidden, own["linear2.weight"], own["linear2.bias"]))


def later(length: int, device: torch.device) -> Tensor:
    """[L, L], True for keys after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


OP = DecoderLayer()
