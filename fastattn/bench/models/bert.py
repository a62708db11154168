"""BERT's encoder (Devlin et al. 2019, https://arxiv.org/abs/1810.04805), without the pooler."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.models._model import TEXT_SIZES, Model
from fastattn.bench.ops._base import Sizes


class Bert(Model):
    FUNCTION = "transformers.BertModel"
    ABOUT = "N layers of width E, H heads, F hidden units, V words, on B sentences of L tokens"
    SIZES: ClassVar[Sizes] = TEXT_SIZES
    MASKS = ("none", "padding")

    def make(self, cell: Cell) -> nn.Module:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=cell["V"],
            hidden_size=cell["E"],
            num_hidden_layers=cell["N"],
            num_attention_heads=cell["H"],
            intermediate_size=cell["F"],
            max_position_embeddings=max(512, cell["L"]),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertModel(config, add_pooling_layer=False)


OP = Bert()
