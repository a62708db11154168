"""Tiny models of diffusers, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from libraries import library
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


Sizes = dict[str, Any]
HEADS: Sizes = {"attention_head_dim": 16, "num_attention_heads": 2}
IMAGES: Sizes = {"num_layers": 1, "in_channels": 4, "joint_attention_dim": 8, **HEADS}
TIMES = torch.tensor([0.3, 0.7], dtype=torch.float64)
PADDED = torch.tensor([[1, 1, 1], [1, 1, 0]])


def made(name: str, sizes: Sizes, **inputs: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of diffusers with its inputs."""
    return getattr(library("diffusers"), name)(**sizes), inputs


def flux() -> tuple[nn.Module, dict[str, Any]]:
    """A small Flux transformer and its inputs."""
    own = {"num_single_layers": 1, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}
    return made(
        *("FluxTransformer2DModel", IMAGES | own),
        hidden_states=draw(2, 6, 4),
        encoder_hidden_states=draw(2, 3, 8),
        pooled_projections=draw(2, 8),
        timestep=TIMES,
        img_ids=torch.arange(18.0, dtype=torch.float64).view(6, 3) % 5,
        txt_ids=torch.zeros(3, 3, dtype=torch.float64),
    )


def qwen_image() -> tuple[nn.Module, dict[str, Any]]:
    """Its text is padded: it has a mask."""
    return made(
        *("QwenImageTransformer2DModel", IMAGES | {"out_channels": 4, "axes_dims_rope": (4, 6, 6)}),
        hidden_states=draw(2, 4, 4),
        encoder_hidden_states=draw(2, 3, 8),
        encoder_hidden_states_mask=PADDED,
        timestep=TIMES,
        img_shapes=[[(1, 2, 2)]] * 2,
    )


def wan() -> tuple[nn.Module, dict[str, Any]]:
    """A video and cross-attention."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 1}
    sizes |= {"out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 8}
    return made(
        *("WanTransformer3DModel", sizes),
        hidden_states=draw(1, 4, 2, 4, 4),
        encoder_hidden_states=draw(1, 3, 8),
        timestep=torch.tensor([3]),
    )


def dit() -> tuple[nn.Module, dict[str, Any]]:
    """A small DiT and its inputs."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 2, "num_layers": 1}
    sizes |= {"norm_num_groups": 2, "sample_size": 8, "num_embeds_ada_norm": 8}
    return made(
        *("DiTTransformer2DModel", sizes),
        hidden_states=draw(1, 2, 8, 8),
        timestep=torch.tensor([3]),
        class_labels=torch.tensor([2]),
    )


def unet() -> tuple[nn.Module, dict[str, Any]]:
    """Self-attention, and cross-attention to a padded text."""
    sizes: Sizes = {"layers_per_block": 1, "sample_size": 8, "in_channels": 2, "out_channels": 2}
    sizes |= {"norm_num_groups": 2, "cross_attention_dim": 8, "attention_head_dim": 2}
    sizes |= {"block_out_channels": (8, 16)}
    sizes["down_block_types"] = ("DownBlock2D", "CrossAttnDownBlock2D")
    sizes["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    return made(
        *("UNet2DConditionModel", sizes),
        sample=draw(2, 2, 8, 8),
        timestep=torch.tensor([3]),
        encoder_hidden_states=draw(2, 3, 8),
        encoder_attention_mask=PADDED,
    )
