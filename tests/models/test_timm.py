"""Models of timm, whose fused attention calls PyTorch's function, on ours and on PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from libraries import library
from library_runs import compared, initialized
from torch import Tensor, nn

from fastattn.integrations.torch import activate

SMALL = {"img_size": 32, "embed_dim": 16, "num_classes": 5}
PLAIN = SMALL | {"patch_size": 8, "depth": 2, "num_heads": 2}
WINDOWS = SMALL | {"window_size": 4, "depths": (2, 1), "num_heads": (2, 4)}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": PLAIN,
    "deit_tiny_distilled_patch16_224": PLAIN,
    "beit_base_patch16_224": PLAIN,  # a relative position bias, learned
    "eva02_tiny_patch14_224": PLAIN | {"embed_dim": 24, "img_size": 28, "patch_size": 14},  # rotary
    "swin_tiny_patch4_window7_224": WINDOWS,  # a bias, learned, and a mask of shifted windows
    "vit_base_patch16_siglip_224": PLAIN,  # pools by attention
    "hiera_tiny_224": {"img_size": 32, "num_classes": 5, "stages": (1, 1, 1, 1)},  # pools queries
}


@pytest.fixture(autouse=True)
def every_fused_attention() -> Iterator[None]:
    """Swin's is one that timm has not enabled by default."""
    timm = library("timm")
    timm.layers.set_fused_attn(True, experimental=True)
    yield
    timm.layers.set_fused_attn(True)


def model_and_images(name: str) -> tuple[nn.Module, Tensor]:
    """A small model of timm and two images."""
    torch.manual_seed(0)
    model = library("timm").create_model(name, **MODELS[name])
    initialized(model)
    size = MODELS[name]["img_size"]
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


class Named(nn.Module):
    """A model whose output has a name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(images)}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str) -> None:
    model, images = model_and_images(name)
    compared(Named(model), {"images": images}, activate())
