"""Sizes and inputs of the tiny models in tests/support/transformers_models.py."""

from __future__ import annotations

import torch
from torch import Tensor

Inputs = dict[str, Tensor]

BATCH, LENGTH, VOCABULARY = 2, 11, 67
PAD = 0

# Names differ between families; each configuration uses its own and ignores the others.
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": PAD,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}


def text(generator: torch.Generator, batch: int = BATCH, length: int = LENGTH) -> Inputs:
    """Tokens, none of them special."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}


def two_texts(generator: torch.Generator) -> Inputs:
    return text(generator) | {"decoder_input_ids": text(generator, length=7)["input_ids"]}


def image(generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}


def large_image(generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 64, 64, generator=generator)}


def image_and_text(generator: torch.Generator) -> Inputs:
    return text(generator) | image(generator)


def image_with_border(generator: torch.Generator) -> Inputs:
    """A batch of images of two sizes: pixel_mask is 0 beyond the smaller one."""
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[0, :, 40:] = 0
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator), "pixel_mask": mask}


def image_and_points(generator: torch.Generator) -> Inputs:
    points = torch.rand(1, 1, 2, 2, generator=generator) * 64
    return large_image(generator) | {"input_points": points}


def video(generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16, generator=generator)}


def speech(generator: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(BATCH, 160, generator=generator)}


def spectrogram(generator: torch.Generator) -> Inputs:
    features = torch.randn(BATCH, 8, 32, generator=generator)
    return {"input_features": features, "decoder_input_ids": text(generator)["input_ids"]}


def boxed_text(generator: torch.Generator) -> Inputs:
    corners = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=generator)
    return text(generator) | {"bbox": torch.cat([corners, corners + 9], -1)}
