"""Tiny models of libraries, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from libraries import library
from library_runs import initialized
from torch import nn

WIDTH = 16


def open_clip_model() -> Any:
    """A vision transformer and a text transformer."""
    open_clip = library("open_clip")
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=16, image_size=32)
    text = open_clip.CLIPTextCfg(context_length=6, vocab_size=20, width=16, heads=2, layers=1)
    return open_clip.model.CLIP(8, vision, text)


def whisper_model() -> Any:
    """A small Whisper model."""
    whisper = library("whisper").model
    return whisper.Whisper(whisper.ModelDimensions(4, 5, WIDTH, 2, 1, 20, 6, WIDTH, 2, 1))


# The class of the configuration, and what differs from it. In 3.5, test rows have fewer key heads.
TABPFN: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("TabPFNV2Config", {}),
    "v2_5": ("TabPFNV2p5Config", {}),
    "v2_6": ("TabPFNV2p6Config", {}),
    "v3": ("TabPFNV3Config", {}),
    "v3_5": ("TabPFNV3p5Config", {"icl_num_kv_heads_test": 1}),
}


def tabpfn_model(version: str = "v2_6") -> nn.Module:
    """Two layers of an architecture of TabPFN, for three classes, in float64."""
    architecture: Any = library(f"tabpfn.architectures.tabpfn_{version}")
    config, options = TABPFN[version]
    config = getattr(architecture, config)(max_num_classes=3, num_buckets=10, nlayers=2, **options)
    model: nn.Module = architecture.get_architecture(config)
    initialized(model)
    return model


def torchvision_model() -> Any:
    """A vision transformer."""
    return library("torchvision").models.VisionTransformer(
        image_size=32,
        patch_size=16,
        num_layers=1,
        num_heads=2,
        hidden_dim=WIDTH,
        mlp_dim=WIDTH,
        num_classes=5,
    )


def sentence_modules(
    folder: Path, kind: str = "Bert", pooling: str = "mean", **settings: Any
) -> list[nn.Module]:
    """The modules of a model that embeds sentences, by a model of transformers of this kind."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"one two three four five six seven".split()]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(words),
        pad_token_id=0,
        hidden_size=WIDTH,
        num_hidden_layers=settings.pop("layers", 1),
        num_attention_heads=2,
        intermediate_size=WIDTH,
        **settings,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    modules = library("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(folder))
    return [transformer, modules.Pooling(WIDTH, pooling)]
