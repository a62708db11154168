"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) on a prompt, filling the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.models._model import Model
from fastattn.bench.ops._base import Sizes


class Llama(Model):
    FUNCTION = "transformers.LlamaModel"
    ABOUT = "N layers of width E, H heads on Hkv key heads, F hidden units, on prompts of L tokens"
    SIZES: ClassVar[Sizes] = {
        "B": 1,
        "L": 512,
        "N": 22,
        "E": 2048,
        "H": 32,
        "Hkv": 4,
        "F": 5632,
        "V": 32000,
    }
    PASSES: ClassVar[tuple[str, ...]] = ("fwd",)
    CAUSAL = True

    def config(self, cell: Cell) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=cell["V"],
            hidden_size=cell["E"],
            num_hidden_layers=cell["N"],
            num_attention_heads=cell["H"],
            num_key_value_heads=cell["Hkv"],
            intermediate_size=cell["F"],
            max_position_embeddings=max(2048, cell["L"] + 1),
        )

    def make(self, cell: Cell) -> nn.Module:
        from transformers import LlamaModel

        return LlamaModel(self.config(cell))

    def weights(self, sizes: Mapping[str, int]) -> int:
        embed, keys = sizes["E"], sizes["E"] // sizes["H"] * sizes["Hkv"]
        return 2 * embed * (embed + keys) + 3 * embed * sizes["F"]


OP = Llama()
