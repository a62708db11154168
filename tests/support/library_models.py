"""Tiny models of libraries, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from libraries import library
from torch import nn

WIDTH = 16


def open_clip_model() -> Any:
    """A vision transformer and a text transformer."""
    open_clip = library("open_clip")
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=16, image_size=32)
    text = open_clip.CLIPTextCfg(context_length=6, vocab_size=20, width=16, heads=2, layers=1)
    return open_clip.model.CLIP(8, vision, text)


def whisper_model() -> Any:
    whisper = library("whisper").model
    return whisper.Whisper(whisper.ModelDimensions(4, 5, WIDTH, 2, 1, 20, 6, WIDTH, 2, 1))


def sentence_modules(folder: Path) -> list[nn.Module]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"one two three four five six seven".split()]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    modules = library("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(folder))
    return [transformer, modules.Pooling(WIDTH)]
