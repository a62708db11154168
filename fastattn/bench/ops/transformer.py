"""`Transformer`: the base model of Vaswani et al. 2017 between its embeddings and its logits.

Six layers and a norm in the encoder, six and a norm in the causal decoder. Step by step, as when a
model generates, the decoder has one position at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops.decoder import STACK, Decoder, decoded
from fastattn.bench.ops.encoder import LAYERS, stored
from fastattn.bench.ops.encoder import OP as ENCODER
from fastattn.nn import Transformer

_NORM = ("norm.weight", "norm.bias")
_ENCODER = tuple(stored(name) for name in ENCODER.LEAVES[1:])


class WholeTransformer(Decoder):
    FUNCTION = "nn.Transformer"
    ABOUT = f"{LAYERS} encoder layers on src [B, S, E], {LAYERS} causal ones on tgt [B, L, E], GELU"
    TORCH = "nn.Transformer, the same parameters; step by step, each prefix from its start"
    OPTIONS: ClassVar[Sequence[str]] = ("none", "stepwise")
    LEAVES = (
        *("src", "tgt"),
        *(f"encoder.{name}" for name in (*_ENCODER, *_NORM)),
        *(f"decoder.{name}" for name in (*STACK, *_NORM)),
    )

    def check_option(self, cell: Cell) -> None:
        if cell.option == "stepwise" and cell.passes != "fwd":
            raise ValueError("option=stepwise: generating has no backward pass")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = super().flops(cell, pairs)
        batch, source, embed = cell["B"], cell["S"], cell["E"]
        products = LAYERS * batch * source * (8 * embed**2 + 4 * embed * cell["F"])
        attention = LAYERS * batch * source**2 * embed
        return forward + products + 4 * attention, backward + 2 * products + 10 * attention

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        model: nn.Module = self.of(Transformer, cell, made)
        return model

    def make_torch(self, cell: Cell, **made: Any) -> nn.Module:
        model: nn.Module = self.of(nn.Transformer, cell, made)
        return model

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        target = (cell["B"], cell["L"], cell["E"])
        return {
            "src": draw.normal(cell["B"], cell["S"], cell["E"]),
            "tgt": draw.normal(*target),
            "grad_out": draw.normal(*target),
        }

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        source, target, mask = inputs["src"], inputs["tgt"], inputs.get("tgt_mask")
        if cell.option == "stepwise":
            return _step_by_step(module, source, target, mask)
        out: Tensor = module(source, target, tgt_mask=mask, tgt_is_causal=True)
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        encoder, decoder = (
            {n.removeprefix(head): x for n, x in inputs.items() if n.startswith(head)}
            for head in ("encoder.", "decoder.")
        )

        def norm(own: Inputs, x: Tensor) -> Tensor:
            weight, bias = (own[name] for name in _NORM)
            return functional.layer_norm(x, x.shape[-1:], weight, bias)

        layers = {name: encoder[stored(name)] for name in ENCODER.LEAVES[1:]}
        memory = norm(encoder, ENCODER.plain(cell, layers | {"x": inputs["src"]})[0])
        return (norm(decoder, decoded(cell, decoder, inputs["tgt"], memory)),)


def _step_by_step(model: Any, source: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Ours decodes with a cache. PyTorch's has none, and needs the mask."""
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
