"""`MultiheadAttention`, the layers of a Transformer, their stacks, and the whole.

The stacks have the six layers of the base model of Vaswani et al. 2017, without embeddings and
logits. All use GELU. The gradient of a ReLU is discontinuous at 0: rounding alone would decide the
gradient of hidden units near 0, and no bound could judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import visible_keys
from fastattn.bench.ops._base import Inputs, Outputs, Prepared
from fastattn.bench.ops._module import Twin

LAYERS = 6  # not a size, because each layer has its own parameters
_OPTIONS: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}


class _Mha(Twin):
    FUNCTION = "nn.MultiheadAttention"
    ABOUT = "self-attention of x [B, L, E] with H heads and its projections, batch_first"
    MASKS: Sequence[str] = ("none", "causal", "padding", "bool", "bias")
    WEIGHTS: Sequence[str] = ("none", "average", "per-head")
    OUTPUT = "B L E"
    # Three input projections and one output projection; each has two products in the backward.
    FLOPS = ("4 * pairs * E + 8 * B * L * E**2", "10 * pairs * E + 16 * B * L * E**2")

    def elements(self, cell: Cell) -> tuple[int, int]:
        tokens = cell["B"] * cell["L"] * cell["E"]
        return tokens + 4 * cell["E"] ** 2, tokens

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


class _EncoderLayer(_Mha):
    FUNCTION = "nn.TransformerEncoderLayer"
    ABOUT = "a post-norm layer with GELU on x [B, L, E], H heads, F hidden units, batch_first"
    MASKS: Sequence[str] = ("none", "padding")
    WEIGHTS = ("none",)
    LAYERS = 1

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        hidden = 4 * cell["B"] * cell["L"] * cell["E"] * cell["F"]
        return self.LAYERS * (forward + hidden), self.LAYERS * (backward + 2 * hidden)

    def elements(self, cell: Cell) -> tuple[int, int]:
        inputs, tokens = super().elements(cell)
        weights = inputs - tokens + 2 * cell["E"] * cell["F"]
        return tokens + self.LAYERS * weights, tokens

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], cell["F"]
        return library.TransformerEncoderLayer(*sizes, **_OPTIONS, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        return module(inputs["x"], src_key_padding_mask=inputs.get("key_padding_mask"))


class _Encoder(_EncoderLayer):
    FUNCTION = "nn.TransformerEncoder"
    ABOUT = f"{LAYERS} post-norm layers with GELU on x [B, L, E], H heads, F hidden units"
    MASKS = ("none",)
    LAYERS = LAYERS

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        return library.TransformerEncoder(super().build(library, cell, **made), LAYERS)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        return module(inputs["x"])


class _DecoderLayer(Twin):
    FUNCTION = "nn.TransformerDecoderLayer"
    ABOUT = "a causal post-norm layer with GELU on x [B, L, E] and memory [B, S, E], batch_first"
    OUTPUT = "B L E"
    LAYERS = 1

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, length, source, embed = (cell[key] for key in "BLSE")
        products = 12 * length * embed**2 + 4 * source * embed**2  # the projections of both
        products = self.LAYERS * batch * (products + 4 * length * embed * cell["F"])
        pairs = self.LAYERS * batch * (length * (length + 1) // 2 + length * source)
        return products + 4 * pairs * embed, 2 * products + 10 * pairs * embed

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], cell["F"]
        return library.TransformerDecoderLayer(*sizes, **_OPTIONS, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        mask = inputs.get("tgt_mask")
        return module(*self.leaves(inputs), tgt_mask=mask, tgt_is_causal=True)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        square = torch.ones(cell["L"], cell["L"], dtype=torch.bool)
        mask = square.triu(1).to(inputs["grad_out"].device)  # PyTorch needs the mask, too
        return super().theirs(cell, inputs | {"tgt_mask": mask})


class _Decoder(_DecoderLayer):
    FUNCTION = "nn.TransformerDecoder"
    ABOUT = f"{LAYERS} causal post-norm layers with GELU on x [B, L, E] and memory [B, S, E]"
    LAYERS = LAYERS

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        return library.TransformerDecoder(super().build(library, cell, **made), LAYERS)


class _Transformer(_Decoder):
    """With option=stepwise the decoder gets one position at a time, as in generation."""

    FUNCTION = "nn.Transformer"
    ABOUT = f"{LAYERS} encoder layers on src [B, S, E], {LAYERS} causal ones on tgt [B, L, E], GELU"
    OPTIONS = ("none", "stepwise")

    def check_option(self, cell: Cell) -> None:
        if cell.option == "stepwise" and cell.passes != "fwd":
            raise ValueError("option=stepwise: generation has no backward pass")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        batch, source, embed = cell["B"], cell["S"], cell["E"]
        products = LAYERS * batch * source * (8 * embed**2 + 4 * embed * cell["F"])
        attention = LAYERS * batch * source**2 * embed
        return forward + products + 4 * attention, backward + 2 * products + 10 * attention

    def build(self, library: Any, cell: Cell, **made: Any) -> Any:
        sizes = cell["E"], cell["H"], LAYERS, LAYERS, cell["F"]
        return library.Transformer(*sizes, **_OPTIONS, **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        if cell.option == "stepwise":
            return _step_by_step(module, inputs["src"], inputs["tgt"], inputs.get("tgt_mask"))
        return super().call(cell, module, inputs)


def _step_by_step(model: Any, source: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Generation; fastattn has a cache. PyTorch has none, and needs the mask."""
    memory = model.encoder(source)
    if mask is None:
        cache = model.decoder.new_cache()
        return torch.cat([model.decode(x, memory, cache=cache) for x in target.split(1, 1)], 1)
    steps = [
        model.decoder(target[:, :n], memory, tgt_mask=mask[:n, :n], tgt_is_causal=True)[:, -1:]
        for n in range(1, target.shape[1] + 1)
    ]
    return torch.cat(steps, 1)


def _twin(kind: type[Twin], sizes: dict[str, Any], shapes: dict[str, str], note: str = "") -> Twin:
    torch_name = f"{kind.FUNCTION}, the same parameters{note}"
    return kind(SIZES=sizes, SHAPES=shapes, TORCH=torch_name)


_SIZES = {"B": 8, "L": 128, "E": 512, "H": 8, "F": 2048}
_WITH_MEMORY = {"B": 8, "L": 128, "S": "L", "E": 512, "H": 8, "F": 2048}

MHA = _twin(_Mha, {"B": 1, "L": 512, "E": 512, "H": 8}, {"x": "B L E"})
ENCODER_LAYER = _twin(_EncoderLayer, _SIZES, {"x": "B L E"})
ENCODER = _twin(_Encoder, _SIZES, {"x": "B L E"})
DECODER_LAYER = _twin(_DecoderLayer, _WITH_MEMORY, {"x": "B L E", "memory": "B S E"})
DECODER = _twin(_Decoder, _WITH_MEMORY, {"x": "B L E", "memory": "B S E"})
TRANSFORMER = _twin(
    _Transformer,
    _WITH_MEMORY,
    {"src": "B S E", "tgt": "B L E"},
    "; stepwise, each prefix from its start",
)
