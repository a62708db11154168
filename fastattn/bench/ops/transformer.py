"""`Transformer`: the base model of Vaswani et al. 2017, without embeddings and logits.

The encoder and the causal decoder have six layers and a norm each. With option=stepwise the decoder
gets one position at a time, as in generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops._layers import norm
from fastattn.bench.ops._module import below
from fastattn.bench.ops.decoder import Decoder, decoded
from fastattn.bench.ops.encoder import LAYERS, encoded
from fastattn.bench.ops.encoder_layer import OPTIONS


class WholeTransformer(Decoder):
    FUNCTION = "nn.Transformer"
    ABOUT = f"{LAYERS} encoder layers on src [B, S, E], {LAYERS} causal ones on tgt [B, L, E], GELU"
    TORCH = "nn.Transformer, the same parameters; stepwise, each prefix from its start"
    OPTIONS: ClassVar[Sequence[str]] = ("none", "stepwise")
    SHAPES: ClassVar = {"src": "B S E", "tgt": "B L E"}

    def check_option(self, cell: Cell) -> None:
        if cell.option == "stepwise" and cell.passes != "fwd":
            raise ValueError("option=stepwise: generation has no backward pass")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        batch, source, embed = cell["B"], cell["S"], cell["E"]
        products = LAYERS * batch * source * (8 * embed**2 + 4 * embed * cell["F"])
        attention = LAYERS * batch * source**2 * embed
        return forward + products + 4 * attention, backward + 2 * products + 10 * attention

    def build(self, library: ModuleType, cell: Cell, **made: Any) -> nn.Module:
        sizes = cell["E"], cell["H"], LAYERS, LAYERS, cell["F"]
        module: nn.Module = library.Transformer(*sizes, **OPTIONS, **made)
        return module

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        source, target, mask = inputs["src"], inputs["tgt"], inputs.get("tgt_mask")
        if cell.option == "stepwise":
            return _step_by_step(module, source, target, mask)
        out: Tensor = module(source, target, tgt_mask=mask, tgt_is_causal=True)
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        encoder, decoder = (below(inputs, head) for head in ("encoder.", "decoder."))
        memory = norm(below(encoder, "norm."), encoded(encoder, inputs["src"], cell["H"]))
        out = decoded(decoder, inputs["tgt"], memory, cell["H"])
        return (norm(below(decoder, "norm."), out),)


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


OP = WholeTransformer()
