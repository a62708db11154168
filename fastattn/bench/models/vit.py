"""ViT (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929), without the pooler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.models._model import Model
from fastattn.bench.ops._base import Inputs, Sizes

_COLOURS = 3


class Vit(Model):
    FUNCTION = "transformers.ViTModel"
    ABOUT = "N layers of width E, H heads, F hidden units, on B images of I x I, patches of P x P"
    SIZES: ClassVar[Sizes] = {"B": 8, "I": 224, "P": 16, "N": 12, "E": 768, "H": 12, "F": 3072}
    PASSES: ClassVar[Sequence[str]] = ("fwd",)
    TINY: ClassVar[Mapping[str, int]] = {"B": 1, "I": 32, "N": 1}

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["I"] % sizes["P"]:
            raise ValueError(f"I={sizes['I']} is not a multiple of P={sizes['P']}")

    def make(self, cell: Cell) -> nn.Module:
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            image_size=cell["I"],
            patch_size=cell["P"],
            hidden_size=cell["E"],
            num_hidden_layers=cell["N"],
            num_attention_heads=cell["H"],
            intermediate_size=cell["F"],
        )
        return ViTModel(config, add_pooling_layer=False)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        return {"pixel_values": draw.normal(cell["B"], _COLOURS, cell["I"], cell["I"])}

    def tokens(self, sizes: Mapping[str, int]) -> int:
        return sizes["B"] * ((sizes["I"] // sizes["P"]) ** 2 + 1)

    def pairs(self, cell: Cell, visible: int) -> int:
        return self.tokens(cell.sizes) ** 2 // cell["B"]

    def other(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        weights = _COLOURS * sizes["P"] ** 2 * sizes["E"]
        return weights, (self.tokens(sizes) - sizes["B"]) * weights

    def items(self, cell: Cell) -> tuple[float, str]:
        return cell["B"], "images"


OP = Vit()
