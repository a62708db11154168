"""Linear layers, `MultiheadAttention`, the layers of a Transformer, their stacks, and the whole.

The stacks have the six layers of the base model of Vaswani et al. 2017, without embeddings and
logits. All use GELU: rounding alone would decide the gradient of a ReLU near 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

import fastattn.nn
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Module
from fastattn.bench.ops.attention import visible_keys

LAYERS = 6  # not a size, because each layer has its own parameters


class Twin(Module):
    """A module that `torch.nn` has, too; in float64, torch's module is also the definition."""

    def __init__(self, function: str, **fields: Any) -> None:
        super().__init__(FUNCTION=f"nn.{function}", **fields)

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        """The module of `library`, which is `fastattn.nn` or `torch.nn`: a layer, or a stack."""
        stack = self.FUNCTION.removeprefix("nn.")
        layer = stack.removesuffix("Layer") + "Layer"
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        if stack == "Transformer":
            sizes = cell["E"], cell["H"], LAYERS, LAYERS, cell["F"]
            return library.Transformer(*sizes, **options, **made)
        built = getattr(library, layer)(cell["E"], cell["H"], cell["F"], **options, **made)
        return getattr(library, stack)(built, LAYERS) if stack != layer else built

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return self.build(fastattn.nn, cell, **made)

    def ours(self, cell: Cell, x: Inputs, library: Any = fastattn.nn) -> Forward:
        return self.built(functools.partial(self.build, library), cell, x)

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        return self.ours(cell, x, nn)

    def exact(self, cell: Cell, x: Inputs) -> Forward:
        """In training mode and in one step, without PyTorch's fused layers."""
        return self.eager(dataclasses.replace(cell, passes="fwd+bwd", option="none"), x)


class _Mha(Twin):
    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """In `key_padding_mask` and a boolean `attn_mask`, True is ignored."""
        if cell.mask == "bias":  # the module expects 3-D masks as [B·H, L, S]
            bias = draw.normal(cell["H"], cell["L"], cell["L"])
            return {"attn_mask": bias.repeat(cell["B"], 1, 1)}
        if (visible := visible_keys(cell, draw)) is None:
            return {}
        if cell.mask == "padding":
            return {"key_padding_mask": ~visible[:, 0]}
        return {"attn_mask": ~visible}

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        return library.MultiheadAttention(cell["E"], cell["H"], batch_first=True, **made)

    def call(self, cell: Cell, module: nn.Module, x: Inputs) -> Any:
        out, weights = module(
            *(x.x, x.x, x.x),
            key_padding_mask=x.get("key_padding_mask"),
            need_weights=cell.weights != "none",
            attn_mask=x.get("attn_mask"),
            average_attn_weights=cell.weights != "per-head",
            is_causal=cell.mask == "causal" and cell.weights == "none",
        )
        return out if weights is None else (out, weights)


class _Encoder(Twin):
    others = _Mha.others

    def call(self, cell: Cell, module: nn.Module, x: Inputs) -> Any:
        return module(x.x, src_key_padding_mask=x.get("key_padding_mask"))


class _Decoder(Twin):
    def call(self, cell: Cell, module: nn.Module, x: Inputs) -> Any:
        return module(*self.leaves(x), tgt_mask=x.get("tgt_mask"), tgt_is_causal=True)

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        square = torch.ones(cell["L"], cell["L"], dtype=torch.bool, device=x.grad_out.device)
        x["tgt_mask"] = square.triu(1)  # PyTorch needs the mask, too
        return super().stock(cell, x)


class _Transformer(_Decoder):
    """With option=stepwise the decoder gets one position at a time, as in generation."""

    OPTIONS = ("none", "stepwise")
    REFUSED = {"option == 'stepwise' and passes != 'fwd'": "option=stepwise has no backward pass"}

    def call(self, cell: Cell, module: Any, x: Inputs) -> Any:
        """Generation by fastattn has a cache. PyTorch has none, and needs the mask."""
        if cell.option == "none":
            return super().call(cell, module, x)
        memory, target, mask = module.encoder(x.src), x.tgt, x.get("tgt_mask")
        if mask is None:
            cache = module.decoder.new_cache()
            steps = [module.decode(row, memory, cache=cache) for row in target.split(1, 1)]
            return torch.cat(steps, 1)

        def last_of(n: int) -> Tensor:
            out = module.decoder(target[:, :n], memory, tgt_mask=mask[:n, :n], tgt_is_causal=True)
            return out[:, -1:]

        return torch.cat([last_of(n) for n in range(1, target.shape[1] + 1)], 1)


# Three input projections and one output projection, then the hidden units. A decoder layer has two
# attentions, the second of which projects the memory.
_MATRICES = "(4 * E**2 + 2 * E*F)"
_OF_ENCODER = f"(attention(pairs, E, E) + products(B*L * {_MATRICES}))"
_OF_SOURCE = f"(attention(B * S**2, E, E) + products(B*S * {_MATRICES}))"
_OF_DECODER = (
    "(attention(B * (L * (L + 1) // 2 + L*S), E, E) + products(B*E * (6*L*E + 2*S*E + 2*L*F)))"
)
_SIZES = {"B": 8, "L": 128, "E": 512, "H": 8, "F": 2048}
_WITH_MEMORY = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}
_X: dict[str, Any] = {"SIZES": _SIZES, "SHAPES": "x: B L E"}
_X_AND_MEMORY: dict[str, Any] = {"SIZES": _WITH_MEMORY, "SHAPES": "x: B L E; memory: B S E"}

LINEAR = Twin(
    "Linear",
    build=lambda library, cell, **made: library.Linear(cell["K"], cell["N"], **made),
    ABOUT="x Wᵀ + b, W [N, K]",
    SIZES={"M": 1024, "K": 768, "N": "K"},
    SHAPES="x: M K; out: M N",
    FLOPS="products(M*K*N)",
)
MHA = _Mha(
    "MultiheadAttention",
    ABOUT="self-attention with H heads and its projections, batch_first",
    SIZES={"B": 1, "L": 512, "E": 512, "H": 8},
    SHAPES="x: B L E",
    MASKS=("none", "causal", "padding", "bool", "bias"),
    WEIGHTS=("none", "average", "per-head"),
    FLOPS="attention(pairs, E, E) + products(4 * B*L * E**2)",
)
ENCODER_LAYER = _Encoder(
    "TransformerEncoderLayer",
    ABOUT="a post-norm layer with GELU, H heads, F hidden units, batch_first",
    MASKS=("none", "padding"),
    FLOPS=_OF_ENCODER,
    **_X,
)
ENCODER = _Encoder(
    "TransformerEncoder",
    ABOUT=f"{LAYERS} post-norm layers with GELU, H heads, F hidden units",
    FLOPS=f"{LAYERS} * {_OF_ENCODER}",
    **_X,
)
DECODER_LAYER = _Decoder(
    "TransformerDecoderLayer",
    ABOUT="a causal post-norm layer with GELU on a memory, batch_first",
    FLOPS=_OF_DECODER,
    **_X_AND_MEMORY,
)
DECODER = _Decoder(
    "TransformerDecoder",
    ABOUT=f"{LAYERS} causal post-norm layers with GELU on a memory",
    FLOPS=f"{LAYERS} * {_OF_DECODER}",
    **_X_AND_MEMORY,
)
TRANSFORMER = _Transformer(
    "Transformer",
    ABOUT=f"{LAYERS} encoder layers and {LAYERS} causal decoder layers with GELU",
    SIZES=_WITH_MEMORY,
    SHAPES="src: B S E; tgt: B L E; out: B L E",
    FLOPS=f"{LAYERS} * ({_OF_SOURCE} + {_OF_DECODER})",
)
