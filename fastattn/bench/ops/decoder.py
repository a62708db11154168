"""`TransformerDecoder`: the stack of six layers of Vaswani et al. 2017, causal, on a memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Rounded, Sizes
from fastattn.bench.ops.encoder import LAYERS, stack_of
from fastattn.bench.ops.mha import OP as MHA
from fastattn.bench.ops.mha import PARAMETERS
from fastattn.nn import TransformerDecoder, TransformerDecoderLayer

_LAYER = (
    *(f"self_attn.{name}" for name in PARAMETERS),
    *(f"multihead_attn.{name}" for name in PARAMETERS),
    *("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
    *(f"norm{n}.{name}" for n in (1, 2, 3) for name in ("weight", "bias")),
)
_STACK = tuple(f"layers.{n}.{name}" for n in range(LAYERS) for name in _LAYER)


class Decoder(Operator):
    FUNCTION = "nn.TransformerDecoder"
    ABOUT = f"{LAYERS} causal post-norm layers with GELU on x [B, L, E] and memory [B, S, E]"
    TORCH = "nn.TransformerDecoder, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}
    LEAVES = ("x", "memory", *_STACK)

    def check(self, sizes: Mapping[str, int]) -> None:
        MHA.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, length, source, embed = (cell[key] for key in ("B", "L", "S", "E"))
        products = 12 * length * embed**2 + 4 * source * embed**2  # the projections of both
        products = batch * (products + 4 * length * embed * cell["F"])
        pairs = batch * (length * (length + 1) // 2 + length * source)
        forward, backward = products + 4 * pairs * embed, 2 * products + 10 * pairs * embed
        return LAYERS * forward, LAYERS * backward

    def elements(self, cell: Cell) -> tuple[int, int]:
        embed, tokens = cell["E"], cell["B"] * cell["L"] * cell["E"]
        parameters = LAYERS * (8 * embed**2 + 2 * embed * cell["F"])
        return tokens + cell["B"] * cell["S"] * embed + parameters, tokens

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, embed, hidden = cell["B"], cell["E"], cell["F"]
        sizes = {
            "in_proj_weight": (3 * embed, embed),
            "in_proj_bias": (3 * embed,),
            "linear1.weight": (hidden, embed),
            "linear1.bias": (hidden,),
            "linear2.weight": (embed, hidden),
            "out_proj.weight": (embed, embed),
        }
        inputs = {
            "x": draw.normal(batch, cell["L"], embed),
            "memory": draw.normal(batch, cell["S"], embed),
            "grad_out": draw.normal(batch, cell["L"], embed),
        }
        for name in _STACK:
            kind = name.split(".", 2)[2].removeprefix("self_attn.").removeprefix("multihead_attn.")
            size = sizes.get(kind, (embed,))
            scale = size[1] ** -0.5 if len(size) == 2 else 0.1
            inputs[name] = draw.normal(*size, scale=scale)
            if kind.startswith("norm") and kind.endswith("weight"):
                inputs[name] += 1
        return inputs

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        layer: Callable[..., Any] = TransformerDecoderLayer
        return self._prepare(TransformerDecoder, layer, cell, inputs, {})

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        mask = _later(cell["L"]).to(inputs["x"].device)  # torch's wants the matrix too
        stack, layer = nn.TransformerDecoder, nn.TransformerDecoderLayer
        return self._prepare(stack, layer, cell, inputs, {"tgt_mask": mask})

    def plain(self, cell: Cell, inputs: Inputs, rounded: Rounded) -> Outputs:
        x, memory = inputs["x"], inputs["memory"]
        before = ~_later(cell["L"])
        for n in range(LAYERS):
            own = {name: inputs[f"layers.{n}.{name}"] for name in _LAYER}
            x = _layer(own, x, memory, before, cell["H"], rounded)
        return (x,)

    def _prepare(
        self,
        stack: Callable[..., Any],
        layer: Callable[..., Any],
        cell: Cell,
        inputs: Inputs,
        mask: Inputs,
    ) -> Prepared:
        x, memory = inputs["x"], inputs["memory"]
        module = stack_of(stack, layer, cell, inputs, _STACK, lambda name: name)
        parameters = dict(module.named_parameters())
        leaves = [x, memory, *(parameters[name] for name in _STACK)]
        return lambda: (module(x, memory, tgt_is_causal=True, **mask),), leaves


def _layer(
    own: Inputs, x: Tensor, memory: Tensor, before: Tensor, heads: int, rounded: Rounded
) -> Tensor:
    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return rounded(x @ weight.T + bias)

    def norm(n: int, x: Tensor) -> Tensor:
        weight, bias = own[f"norm{n}.weight"], own[f"norm{n}.bias"]
        return rounded(functional.layer_norm(rounded(x), x.shape[-1:], weight, bias))

    def look(name: str, at: Tensor, visible: Tensor | None) -> Tensor:
        weights, biases = (own[f"{name}.in_proj_{kind}"].chunk(3) for kind in ("weight", "bias"))
        query, key, value = (
            linear(source, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
            for source, w, b in zip((x, at, at), weights, biases, strict=True)
        )
        joined = attend(query, key, value, visible, None, rounded)[0].transpose(1, 2).flatten(2)
        return linear(joined, own[f"{name}.out_proj.weight"], own[f"{name}.out_proj.bias"])

    x = norm(1, x + look("self_attn", x, before))
    x = norm(2, x + look("multihead_attn", memory, None))
    hidden = rounded(functional.gelu(linear(x, own["linear1.weight"], own["linear1.bias"])))
    return norm(3, x + linear(hidden, own["linear2.weight"], own["linear2.bias"]))


def _later(length: int) -> Tensor:
    """[L, L], True for what lies in the future."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


OP = Decoder()
