"""DistilBERT's encoder (Sanh et al. 2019, https://arxiv.org/abs/1910.01108)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.models._model import TEXT_SIZES, Model
from fastattn.bench.ops._base import Sizes


class DistilBert(Model):
    FUNCTION = "transformers.DistilBertModel"
    ABOUT = "N layers of width E, H heads, F hidden units, V words, on B sentences of L tokens"
    SIZES: ClassVar[Sizes] = {**TEXT_SIZES, "N": 6}
    MASKS = ("none", "padding")

    def make(self, cell: Cell) -> nn.Module:
        from transformers import DistilBertConfig, DistilBertModel

        config = DistilBertConfig(
            vocab_size=cell["V"],
            dim=cell["E"],
            n_layers=cell["N"],
            n_heads=cell["H"],
            hidden_dim=cell["F"],
            max_position_embeddings=max(512, cell["L"]),
            dropout=0.0,
            attention_dropout=0.0,
        )
        return DistilBertModel(config)


OP = DistilBert()
