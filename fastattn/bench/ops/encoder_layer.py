"""`TransformerEncoderLayer`: a whole layer, attention and feed-forward.

With GELU: the gradient of a ReLU jumps, and where a hidden unit is 0 but for rounding there is no
telling a right one from a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.mha import OP as MHA
from fastattn.bench.ops.mha import PARAMETERS
from fastattn.nn import TransformerEncoderLayer

_OWN = (
    *("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
    *("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
)


class EncoderLayer(Operator):
    FUNCTION = "nn.TransformerEncoderLayer"
    ABOUT = "a post-norm layer with GELU on x [B, L, E], H heads, F hidden units, batch_first"
    TORCH = "nn.TransformerEncoderLayer, the same parameters"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 128, "E": 512, "H": 8, "F": 2048}
    MASKS = ("none", "padding")
    LEAVES = ("x", *PARAMETERS, *_OWN)

    def check(self, sizes: Mapping[str, int]) -> None:
        MHA.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        forward, backward = MHA.flops(cell, pairs)
        hidden = 4 * cell["B"] * cell["L"] * cell["E"] * cell["F"]
        return forward + hidden, backward + 2 * hidden

    def elements(self, cell: Cell) -> tuple[int, int]:
        inputs, outputs = MHA.elements(cell)
        return inputs + 2 * cell["E"] * cell["F"], outputs

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        embed, hidden = cell["E"], cell["F"]
        inputs = MHA.inputs(cell, draw)
        for n, (to, of) in enumerate(((hidden, embed), (embed, hidden)), 1):
            inputs[f"linear{n}.weight"] = draw.normal(to, of, scale=of**-0.5)
            inputs[f"linear{n}.bias"] = draw.normal(to, scale=0.1)
            inputs[f"norm{n}.weight"] = 1 + draw.normal(embed, scale=0.1)
            inputs[f"norm{n}.bias"] = draw.normal(embed, scale=0.1)
        return inputs

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return _prepare(TransformerEncoderLayer, cell, inputs)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return _prepare(nn.TransformerEncoderLayer, cell, inputs)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        def linear(x: Tensor, n: int) -> Tensor:
            return x @ inputs[f"linear{n}.weight"].T + inputs[f"linear{n}.bias"]

        def norm(x: Tensor, n: int) -> Tensor:
            return functional.layer_norm(
                x, x.shape[-1:], inputs[f"norm{n}.weight"], inputs[f"norm{n}.bias"]
            )

        x = norm(inputs["x"] + MHA.plain(cell, inputs)[0], 1)
        return (norm(x + linear(functional.gelu(linear(x, 1)), 2), 2),)


def _prepare(kind: type[nn.TransformerEncoderLayer], cell: Cell, inputs: Inputs) -> Prepared:
    """Eval mode for the forward only, else training without dropout."""
    x = inputs["x"]
    module = kind(
        cell["E"],
        cell["H"],
        cell["F"],
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        dtype=x.dtype,
        device=x.device,
    )
    names = [*(f"self_attn.{name}" for name in PARAMETERS), *_OWN]
    module.load_state_dict({n: inputs[n.removeprefix("self_attn.")] for n in names})
    module.train(cell.passes != "fwd")
    parameters = dict(module.named_parameters())
    padding = inputs.get("key_padding_mask")
    return lambda: (module(x, src_key_padding_mask=padding),), [x, *(parameters[n] for n in names)]


OP = EncoderLayer()
