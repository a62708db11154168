"""GPT-2 (Radford et al. 2019): its layers on a prompt, which fills the cache."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.models._model import Model
from fastattn.bench.ops._base import Sizes


class Gpt2(Model):
    FUNCTION = "transformers.GPT2Model"
    ABOUT = "N layers of width E, H heads, F hidden units, V words, on prompts of L tokens"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 1024, "N": 12, "E": 768, "H": 12, "F": 3072, "V": 50257}
    CAUSAL = True

    def make(self, cell: Cell) -> nn.Module:
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            vocab_size=cell["V"],
            n_embd=cell["E"],
            n_layer=cell["N"],
            n_head=cell["H"],
            n_inner=cell["F"],
            n_positions=max(1024, cell["L"]),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return GPT2Model(config)


OP = Gpt2()
