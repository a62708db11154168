"""`TransformerEncoder`: the stack of six layers of Vaswani et al. 2017."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.encoder_layer import OP as LAYER
from fastattn.bench.ops.mha import PARAMETERS
from fastattn.nn import TransformerEncoder, TransformerEncoderLayer

LAYERS = 6  # not a size: each has leaves of its own


class Encoder(Operator):
    FUNCTION = "nn.TransformerEncoder"
    ABOUT = f"{LAYERS} post-norm layers with GELU on x [B, L, E], H heads, F hidden units"
    TORCH = "nn.TransformerEncoder, the same parameters"
    SIZES: ClassVar[Sizes] = LAYER.SIZES
    LEAVES = ("x", *(f"layers.{n}.{name}" for n in range(LAYERS) for name in LAYER.LEAVES[1:]))

    def check(self, sizes: Mapping[str, int]) -> None:
        LAYER.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = LAYER.flops(cell, pairs)
        return LAYERS * forward, LAYERS * backward

    def elements(self, cell: Cell) -> tuple[int, int]:
        inputs, outputs = LAYER.elements(cell)
        return outputs + LAYERS * (inputs - outputs), outputs

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        layers = [LAYER.inputs(cell, draw) for _ in range(LAYERS)]
        own = {
            f"layers.{n}.{name}": layer[name]
            for n, layer in enumerate(layers)
            for name in LAYER.LEAVES[1:]
        }
        return own | {name: layers[0][name] for name in ("x", "grad_out")}

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        layer: Callable[..., Any] = TransformerEncoderLayer
        return self._prepare(TransformerEncoder, layer, cell, inputs)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._prepare(nn.TransformerEncoder, nn.TransformerEncoderLayer, cell, inputs)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        out: Outputs = (inputs["x"],)
        for n in range(LAYERS):
            own = {name: inputs[f"layers.{n}.{name}"] for name in LAYER.LEAVES[1:]}
            out = LAYER.plain(cell, own | {"x": out[0]})
        return out

    def _prepare(
        self, stack: Callable[..., Any], layer: Callable[..., Any], cell: Cell, inputs: Inputs
    ) -> Prepared:
        """Eval mode for the forward only, else training without dropout."""
        x = inputs["x"]
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        one = layer(cell["E"], cell["H"], cell["F"], **options, dtype=x.dtype, device=x.device)
        module: nn.Module = stack(one, LAYERS)
        module.load_state_dict({stored(name): inputs[name] for name in self.LEAVES[1:]})
        module.train(cell.passes != "fwd")
        parameters = dict(module.named_parameters())
        return lambda: (module(x),), [x, *(parameters[stored(name)] for name in self.LEAVES[1:])]


def stored(name: str) -> str:
    """The name of a leaf in the module's state."""
    head, number, own = name.split(".", 2)
    return f"{head}.{number}.self_attn.{own}" if own in PARAMETERS else name


OP = Encoder()
