"""Whisper's encoder (Radford et al. 2022, https://arxiv.org/abs/2212.04356)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.models._model import Model
from fastattn.bench.ops._base import Inputs, Sizes

_STRIDE = 2  # of the second convolution: a position is two frames of sound
_KERNEL = 3
_POSITIONS_A_SECOND = 50  # a frame is 10 ms


class WhisperEncoder(Model):
    FUNCTION = "transformers.WhisperModel.encoder"
    ABOUT = "N layers of width E, H heads, F hidden units, on B sounds of L positions, M mel bands"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 1500, "M": 80, "N": 12, "E": 768, "H": 12, "F": 3072}
    PASSES = ("fwd",)

    def make(self, cell: Cell) -> nn.Module:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        config = WhisperConfig(
            num_mel_bins=cell["M"],
            max_source_positions=cell["L"],
            d_model=cell["E"],
            encoder_layers=cell["N"],
            encoder_attention_heads=cell["H"],
            encoder_ffn_dim=cell["F"],
        )
        return WhisperEncoder(config)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        return {"input_features": draw.normal(cell["B"], cell["M"], _STRIDE * cell["L"])}

    def other(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        first, second = (_KERNEL * sizes["E"] * channels for channels in (sizes["M"], sizes["E"]))
        return first + second, self.tokens(sizes) * (_STRIDE * first + second)

    def items(self, cell: Cell) -> tuple[float, str]:
        return self.tokens(cell.sizes) / _POSITIONS_A_SECOND, "seconds of sound"


OP = WhisperEncoder()
