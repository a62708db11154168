"""`Transformer`: the base model of Vaswani et al. 2017 between its embeddings and its logits.

Six layers and a norm in the encoder, six and a norm in the causal decoder.
"""

from __future__ import annotations

from typing import Any

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
    TORCH = "nn.Transformer, the same parameters"
    LEAVES = (
        *("src", "tgt"),
        *(f"encoder.{name}" for name in (*_ENCODER, *_NORM)),
        *(f"decoder.{name}" for name in (*STACK, *_NORM)),
    )

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
        mask = inputs.get("tgt_mask")
        out: Tensor = module(inputs["src"], inputs["tgt"], tgt_mask=mask, tgt_is_causal=True)
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


OP = WholeTransformer()
