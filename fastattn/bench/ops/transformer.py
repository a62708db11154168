"""`MultiheadAttention`, the layers of a Transformer, their stacks, and the whole.

The stacks have the six layers of the base model of Vaswani et al. 2017, without embeddings and
logits. All use GELU. The gradient of a ReLU is discontinuous at 0: rounding alone would decide the
gradient of hidden units near 0, and no bound could judge it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import visible_keys
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, value_of
from fastattn.bench.ops._module import Twin

LAYERS = 6  # not a size, because each layer has its own parameters
_OPTIONS: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}


class _Mha(Twin):
    """`nn.MultiheadAttention`, and what consists of it and of linear layers."""

    READ: str  # the elements of the matrices, which are counted without biases and norms

    def elements(self, cell: Cell) -> tuple[int, int]:
        tokens = cell["B"] * cell["L"] * cell["E"]
        return tokens + value_of(self.READ, cell), tokens

    def others(self, cell: Cell, draw: Draw) -> Inputs:
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


class _Encoder(_Mha):
    """A `TransformerEncoderLayer`, or with `STACKED` a `TransformerEncoder`."""

    STACKED = False

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], cell["F"]
        layer = library.TransformerEncoderLayer(*sizes, **_OPTIONS, **made)
        return library.TransformerEncoder(layer, LAYERS) if self.STACKED else layer

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        return module(inputs["x"], src_key_padding_mask=inputs.get("key_padding_mask"))


class _Decoder(Twin):
    """A `TransformerDecoderLayer`, or with `STACKED` a `TransformerDecoder`."""

    STACKED = False

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], cell["F"]
        layer = library.TransformerDecoderLayer(*sizes, **_OPTIONS, **made)
        return library.TransformerDecoder(layer, LAYERS) if self.STACKED else layer

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        mask = inputs.get("tgt_mask")
        return module(*self.leaves(inputs), tgt_mask=mask, tgt_is_causal=True)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        square = torch.ones(cell["L"], cell["L"], dtype=torch.bool)
        mask = square.triu(1).to(inputs["grad_out"].device)  # PyTorch needs the mask, too
        return super().theirs(cell, inputs | {"tgt_mask": mask})


class _Transformer(_Decoder):
    """With option=stepwise the decoder gets one position at a time, as in generation."""

    OPTIONS = ("none", "stepwise")

    def check(self, cell: Cell) -> None:
        super().check(cell)
        if cell.option == "stepwise" and cell.passes != "fwd":
            raise ValueError("option=stepwise: generation has no backward pass")

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], LAYERS, LAYERS, cell["F"]
        return library.Transformer(*sizes, **_OPTIONS, **made)

    def call(self, cell: Cell, module: Any, inputs: Inputs) -> Any:
        """Generation by fastattn has a cache. PyTorch has none, and needs the mask."""
        if cell.option == "none":
            return super().call(cell, module, inputs)
        memory, target, mask = module.encoder(inputs["src"]), inputs["tgt"], inputs.get("tgt_mask")
        if mask is None:
            cache = module.decoder.new_cache()
            steps = [module.decode(x, memory, cache=cache) for x in target.split(1, 1)]
            return torch.cat(steps, 1)

        def last_of(n: int) -> Tensor:
            out = module.decoder(target[:, :n], memory, tgt_mask=mask[:n, :n], tgt_is_causal=True)
            return out[:, -1:]

        return torch.cat([last_of(n) for n in range(1, target.shape[1] + 1)], 1)


def _named(function: str, note: str = "") -> dict[str, str]:
    return {"FUNCTION": function, "TORCH": f"{function}, the same parameters{note}"}


# Three input projections and one output projection, then the hidden units. A decoder layer has two
# attentions, the second of which projects the memory.
_MATRICES = "(4 * E**2 + 2 * E*F)"
_OF_ENCODER = f"(attention(pairs, E, E) + products(B*L * {_MATRICES}))"
_OF_SOURCE = f"(attention(B * S**2, E, E) + products(B*S * {_MATRICES}))"
_OF_DECODER = (
    "(attention(B * (L * (L + 1) // 2 + L*S), E, E) + products(B*E * (6*L*E + 2*S*E + 2*L*F)))"
)
_X = {"SIZES": {"B": 8, "L": 128, "E": 512, "H": 8, "F": 2048}, "SHAPES": {"x": "B L E"}}
_SIZES_WITH_MEMORY = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}
_X_AND_MEMORY = {"SIZES": _SIZES_WITH_MEMORY, "SHAPES": {"x": "B L E", "memory": "B S E"}}

MHA = _Mha(
    **_named("nn.MultiheadAttention"),
    ABOUT="self-attention of x [B, L, E] with H heads and its projections, batch_first",
    SIZES={"B": 1, "L": 512, "E": 512, "H": 8},
    SHAPES={"x": "B L E"},
    MASKS=("none", "causal", "padding", "bool", "bias"),
    WEIGHTS=("none", "average", "per-head"),
    FLOPS="attention(pairs, E, E) + products(4 * B*L * E**2)",
    READ="4 * E**2",
)
ENCODER_LAYER = _Encoder(
    **_named("nn.TransformerEncoderLayer"),
    ABOUT="a post-norm layer with GELU on x [B, L, E], H heads, F hidden units, batch_first",
    MASKS=("none", "padding"),
    FLOPS=_OF_ENCODER,
    READ=_MATRICES,
    **_X,
)
ENCODER = _Encoder(
    **_named("nn.TransformerEncoder"),
    ABOUT=f"{LAYERS} post-norm layers with GELU on x [B, L, E], H heads, F hidden units",
    FLOPS=f"{LAYERS} * {_OF_ENCODER}",
    READ=f"{LAYERS} * {_MATRICES}",
    STACKED=True,
    **_X,
)
DECODER_LAYER = _Decoder(
    **_named("nn.TransformerDecoderLayer"),
    ABOUT="a causal post-norm layer with GELU on x [B, L, E] and memory [B, S, E], batch_first",
    FLOPS=_OF_DECODER,
    **_X_AND_MEMORY,
)
DECODER = _Decoder(
    **_named("nn.TransformerDecoder"),
    ABOUT=f"{LAYERS} causal post-norm layers with GELU on x [B, L, E] and memory [B, S, E]",
    FLOPS=f"{LAYERS} * {_OF_DECODER}",
    STACKED=True,
    **_X_AND_MEMORY,
)
TRANSFORMER = _Transformer(
    **_named("nn.Transformer", "; stepwise, each prefix from its start"),
    ABOUT=f"{LAYERS} encoder layers on src [B, S, E], {LAYERS} causal ones on tgt [B, L, E], GELU",
    SIZES=_SIZES_WITH_MEMORY,
    SHAPES={"src": "B S E", "tgt": "B L E"},
    OUTPUT="B L E",
    FLOPS=f"{LAYERS} * ({_OF_SOURCE} + {_OF_DECODER})",
)
