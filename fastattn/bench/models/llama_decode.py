"""Llama's next token: one token per sequence with a full cache, up to the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.models._model import Call
from fastattn.bench.models.llama import Llama
from fastattn.bench.ops._base import Inputs, Sizes


class LlamaDecode(Llama):
    FUNCTION = "transformers.LlamaForCausalLM"
    ABOUT = "the next token of N layers of width E, H heads on Hkv key heads, a cache of L tokens"
    SIZES: ClassVar[Sizes] = {**Llama.SIZES, "L": 2048}
    CAUSAL = False  # the last token can see all

    def make(self, cell: Cell) -> nn.Module:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM(self.config(cell))

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        """One token, and the keys and values of all layers [B, N, Hkv, L, D]."""
        width = cell["E"] // cell["H"]
        shape = (cell["B"], cell["N"], cell["Hkv"], cell["L"], width)
        return {
            "input_ids": draw.integers(0, cell["V"], cell["B"], 1),
            "keys": draw.normal(*shape),
            "values": draw.normal(*shape),
        }

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Call:
        """The cache grows by one token, as in `generate`, and is cropped again."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(cell["N"]):
            cache.update(given["keys"][:, layer], given["values"][:, layer], layer)

        def call() -> Tensor:
            scores: Tensor = model(given["input_ids"], past_key_values=cache).logits
            cache.crop(-1)
            return scores

        return call

    def tokens(self, sizes: Mapping[str, int]) -> int:
        return sizes["B"]

    def pairs(self, cell: Cell, visible: int) -> int:
        return cell["B"] * (cell["L"] + 1)

    def other(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        weights = sizes["E"] * sizes["V"]
        return weights, self.tokens(sizes) * weights

    def elements(self, cell: Cell) -> tuple[int, int]:
        weights = cell["N"] * self.weights(cell.sizes) + self.other(cell.sizes)[0]
        cached = 2 * cell["B"] * cell["N"] * cell["Hkv"] * cell["L"] * cell["E"] // cell["H"]
        return weights + cached, cell["B"] * cell["V"]


OP = LlamaDecode()
