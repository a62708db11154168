"""DiT of diffusers: one step of denoising (Peebles and Xie 2023, https://arxiv.org/abs/2212.09748)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.models._importing import imported
from fastattn.bench.models._library import LibraryModel
from fastattn.bench.models._model import Call
from fastattn.bench.ops._base import Inputs, Sizes

_CHANNELS = 4  # of a latent image; the model predicts twice as many, means and variances
_STEPS = 1000  # of the diffusion, and classes of images
_WAVES = 256  # the sinusoids of a step


class DiffusersDit(LibraryModel):
    FUNCTION = "diffusers.DiTTransformer2DModel"
    ABOUT = "N layers of width E, H heads, on B latent images of I x I, patches of P x P"
    PACKAGE = "diffusers"
    INSTALL = "pip install fastattn[diffusers]"
    SIZES: ClassVar[Sizes] = {"B": 1, "I": 64, "P": 2, "N": 12, "E": 768, "H": 12}
    PASSES = ("fwd",)
    TINY: ClassVar[Mapping[str, int]] = {"B": 1, "I": 8, "N": 1}

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["I"] % sizes["P"]:
            raise ValueError(f"I={sizes['I']} is not a multiple of P={sizes['P']}")

    def make(self, cell: Cell) -> nn.Module:
        model: nn.Module = imported("diffusers").DiTTransformer2DModel(
            num_attention_heads=cell["H"],
            attention_head_dim=cell["E"] // cell["H"],
            in_channels=_CHANNELS,
            out_channels=2 * _CHANNELS,
            num_layers=cell["N"],
            sample_size=cell["I"],
            patch_size=cell["P"],
            num_embeds_ada_norm=_STEPS,
        )
        return model

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        return {
            "hidden_states": draw.normal(cell["B"], _CHANNELS, cell["I"], cell["I"]),
            "timestep": draw.integers(0, _STEPS, cell["B"]),
            "class_labels": draw.integers(0, _STEPS, cell["B"]),
        }

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Call:
        def call() -> torch.Tensor:
            out: torch.Tensor = model(**given, return_dict=False)[0]
            return out

        return call

    def tokens(self, sizes: Mapping[str, int]) -> int:
        return sizes["B"] * (sizes["I"] // sizes["P"]) ** 2

    def pairs(self, cell: Cell, visible: int) -> int:
        return self.tokens(cell.sizes) ** 2 // cell["B"]

    def weights(self, sizes: Mapping[str, int]) -> int:
        return 12 * sizes["E"] ** 2

    def other(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Patches in and out, for each token; what depends on step and class, for each image."""
        embed = sizes["E"]
        of_token = 3 * _CHANNELS * sizes["P"] ** 2 * embed
        # Each layer embeds the step and makes six vectors of it; so does the end, two vectors.
        step = _WAVES * embed + embed**2
        of_image = sizes["N"] * (step + 6 * embed**2) + step + 2 * embed**2
        return of_token + of_image, self.tokens(sizes) * of_token + sizes["B"] * of_image

    def items(self, cell: Cell) -> tuple[float, str]:
        return cell["B"], "images"


OP = DiffusersDit()
