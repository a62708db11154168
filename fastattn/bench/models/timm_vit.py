"""ViT as timm builds it (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.models._importing import imported
from fastattn.bench.models._library import LibraryModel
from fastattn.bench.models._model import Call
from fastattn.bench.models.vit import Vit
from fastattn.bench.ops._base import Inputs, Sizes


class TimmVit(LibraryModel, Vit):
    FUNCTION = "timm.models.VisionTransformer"
    PACKAGE = "timm"
    INSTALL = "pip install fastattn[timm]"
    SIZES: ClassVar[Sizes] = {"B": 8, "I": 224, "P": 16, "N": 12, "E": 384, "H": 6, "F": 1536}
    PASSES = LibraryModel.PASSES

    def make(self, cell: Cell) -> nn.Module:
        model: nn.Module = imported("timm").models.VisionTransformer(
            img_size=cell["I"],
            patch_size=cell["P"],
            embed_dim=cell["E"],
            depth=cell["N"],
            num_heads=cell["H"],
            mlp_ratio=cell["F"] / cell["E"],
            num_classes=0,
            weight_init="skip",  # they are replaced
        )
        return model

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Call:
        return lambda: model.forward_features(given["pixel_values"])


OP = TimmVit()
