"""Whole models as operators of the benchmark: their sizes, their configuration, and their cost.

A library is imported when a model is built. `selection.WHOLE_MODELS` has the sizes of real models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench.models._model import LibraryModel, Model
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Part, value_of
from fastattn.bench.ops._modes import Intercepting

_COMMON = "num_hidden_layers=N num_attention_heads=H intermediate_size=F hidden_size=E"
_TEXT: dict[str, Any] = {
    "ABOUT": "N layers of width E, H heads, F hidden units, V words, on B sentences of L tokens",
    "MASKS": ("none", "padding"),
}

# Devlin et al. 2019, https://arxiv.org/abs/1810.04805
BERT = Model(
    FUNCTION="transformers.BertModel",
    SIZES={"B": 8, "L": 128, "N": 12, "E": 768, "H": 12, "F": 3072, "V": 30522},
    CONFIG=f"vocab_size=V {_COMMON} max_position_embeddings=512",
    BUILD={"add_pooling_layer": False},
    **_TEXT,
)

# Sanh et al. 2019, https://arxiv.org/abs/1910.01108
DISTILBERT = Model(
    FUNCTION="transformers.DistilBertModel",
    SIZES={**BERT.SIZES, "N": 6},
    CONFIG="vocab_size=V dim=E n_layers=N n_heads=H hidden_dim=F max_position_embeddings=512",
    **_TEXT,
)

# Radford et al. 2019: a prompt, which fills the cache
GPT2 = Model(
    FUNCTION="transformers.GPT2Model",
    ABOUT="N layers of width E, H heads, F hidden units, V words, on prompts of L tokens",
    SIZES={"B": 1, "L": 1024, "N": 12, "E": 768, "H": 12, "F": 3072, "V": 50257},
    CAUSAL=True,
    CONFIG="vocab_size=V n_embd=E n_layer=N n_head=H n_inner=F n_positions=1024",
)

# Touvron et al. 2023, https://arxiv.org/abs/2302.13971
_LLAMA: dict[str, Any] = {
    "PASSES": ("fwd",),
    "LAYER": "2 * E * (E + E // H * Hkv) + 3 * E * F",
    "CONFIG": f"vocab_size=V {_COMMON} num_key_value_heads=Hkv max_position_embeddings=2048",
}
LLAMA = Model(
    FUNCTION="transformers.LlamaModel",
    ABOUT="N layers of width E, H heads on Hkv key heads, F hidden units, on prompts of L tokens",
    SIZES={"B": 1, "L": 512, "N": 22, "E": 2048, "H": 32, "Hkv": 4, "F": 5632, "V": 32000},
    CAUSAL=True,
    **_LLAMA,
)


class _LlamaDecode(Model):
    """One token per sequence with a full cache, up to the scores of all words."""

    LENGTH, PAIRS, ITEMS = "1", "B * (L + 1)", ("B", "tokens")
    OTHER = ("E * V", "B * E * V")

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """One token, and the keys and values of all layers [B, N, Hkv, L, D]."""
        shape = (*(cell[key] for key in ("B", "N", "Hkv", "L")), cell["E"] // cell["H"])
        token = draw.integers(0, cell["V"], cell["B"], 1)
        return {"input_ids": token, "keys": draw.normal(*shape), "values": draw.normal(*shape)}

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Forward:
        """The cache grows by one token, as in `generate`, and is cropped again."""
        cache = import_module("transformers").DynamicCache()
        for layer in range(cell["N"]):
            cache.update(given["keys"][:, layer], given["values"][:, layer], layer)

        def call() -> Tensor:
            scores: Tensor = model(given["input_ids"], past_key_values=cache).logits
            cache.crop(-1)
            return scores

        return call

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        cached = f"2 * B*N*Hkv*L * E // H + N * ({self.LAYER}) + {self.OTHER[0]}"
        return value_of(cached, cell), cell["B"] * cell["V"]


LLAMA_DECODE = _LlamaDecode(
    FUNCTION="transformers.LlamaForCausalLM",
    ABOUT="the next token of N layers of width E, H heads on Hkv key heads, a cache of L tokens",
    SIZES={**LLAMA.SIZES, "L": 2048},
    **_LLAMA,
)

# Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929: images, a class token, no pooler
_VIT: dict[str, Any] = {
    "ITEMS": ("B", "images"),
    "ABOUT": "N layers of width E, H heads, F hidden units, on B images of I x I, patches of P x P",
    "LENGTH": "((I//P)**2+1)",
    "PAIRS": "B * ((I // P)**2 + 1)**2",
    "OTHER": ("3 * P**2 * E", "B * (I // P)**2 * 3 * P**2 * E"),
    "others": lambda cell, draw: {"pixel_values": draw.normal(cell["B"], 3, cell["I"], cell["I"])},
}
VIT = Model(
    FUNCTION="transformers.ViTModel",
    SIZES={"B": 8, "I": 224, "P": 16, "N": 12, "E": 768, "H": 12, "F": 3072},
    PASSES=("fwd",),
    CONFIG=f"image_size=I patch_size=P {_COMMON}",
    BUILD={"add_pooling_layer": False},
    **_VIT,
)
TIMM_VIT = LibraryModel(
    FUNCTION="timm.models.VisionTransformer",
    PACKAGE="timm",
    INSTALL="pip install fastattn[timm]",
    SIZES={"B": 8, "I": 224, "P": 16, "N": 12, "E": 384, "H": 6, "F": 1536},
    build=lambda cell: import_module("timm").models.VisionTransformer(
        *(cell["I"], cell["P"]),
        embed_dim=cell["E"],
        depth=cell["N"],
        num_heads=cell["H"],
        mlp_ratio=cell["F"] / cell["E"],
        num_classes=0,
        weight_init="skip",
    ),
    bind=lambda cell, model, given: lambda: model.forward_features(given["pixel_values"]),
    **_VIT,
)

# Peebles and Xie 2023, https://arxiv.org/abs/2212.09748: one step of denoising. The model predicts
# means and variances of 4 channels. A step is embedded by 256 sinusoids; each layer derives six
# vectors from it, the last layer two.
_OF_TOKEN = "12 * P**2 * E"
_OF_IMAGE = "(N * (256*E + 7 * E**2) + 256*E + 3 * E**2)"
DIFFUSERS_DIT = LibraryModel(
    FUNCTION="diffusers.DiTTransformer2DModel",
    ABOUT="N layers of width E, H heads, on B latent images of I x I, patches of P x P",
    PACKAGE="diffusers",
    INSTALL="pip install fastattn[diffusers]",
    SIZES={"B": 1, "I": 64, "P": 2, "N": 12, "E": 768, "H": 12},
    PASSES=("fwd",),
    LENGTH="(I//P)**2",
    PAIRS="B * (I // P)**4",
    LAYER="12 * E**2",
    OTHER=(f"{_OF_TOKEN} + {_OF_IMAGE}", f"B * (I // P)**2 * {_OF_TOKEN} + B * {_OF_IMAGE}"),
    build=lambda cell: import_module("diffusers").DiTTransformer2DModel(
        *(cell["H"], cell["E"] // cell["H"]),
        in_channels=4,
        out_channels=8,
        num_layers=cell["N"],
        sample_size=cell["I"],
        patch_size=cell["P"],
        num_embeds_ada_norm=1000,
    ),
    others=lambda cell, draw: {
        "hidden_states": draw.normal(cell["B"], 4, cell["I"], cell["I"]),
        "timestep": draw.integers(0, 1000, cell["B"]),
        "class_labels": draw.integers(0, 1000, cell["B"]),
    },
    bind=lambda cell, model, given: lambda: model(**given, return_dict=False)[0],
    ITEMS=("B", "images"),
)

# Radford et al. 2022, https://arxiv.org/abs/2212.04356: the encoder. A position is two frames of
# sound of 10 ms, because the second convolution has a stride of 2; both are three frames wide.
_WHISPER: dict[str, Any] = {
    "SIZES": {"B": 1, "L": 1500, "M": 80, "N": 12, "E": 768, "H": 12, "F": 3072},
    "PASSES": ("fwd",),
    "OTHER": ("3*E*M + 3 * E**2", "B * L * (2 * 3*E*M + 3 * E**2)"),
    "ITEMS": ("B * L / 50", "seconds of sound"),
    "others": lambda cell, draw: {
        "input_features": draw.normal(cell["B"], cell["M"], 2 * cell["L"]),
    },
}
WHISPER_ENCODER = Model(
    FUNCTION="transformers.WhisperModel.encoder",
    ABOUT="N layers of width E, H heads, F hidden units, on B sounds of L positions, M mel bands",
    CLASS="models.whisper.modeling_whisper.WhisperEncoder",
    CONFIG="num_mel_bins=M max_source_positions=L d_model=E encoder_layers=N "
    "encoder_attention_heads=H encoder_ffn_dim=F",
    **_WHISPER,
)


def _in_double(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms convert their inputs to float32; the reference keeps float64."""
    return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


OPENAI_WHISPER = LibraryModel(
    FUNCTION="whisper.model.AudioEncoder",
    ABOUT="N layers of width E, H heads, 4 E hidden units, on B sounds of L places, M mel bands",
    PACKAGE="whisper",
    INSTALL="pip install openai-whisper",
    CALLER="whisper.model",
    exactly=functools.partial(Intercepting, _in_double),
    build=lambda cell: import_module("whisper").model.AudioEncoder(*(cell[key] for key in "MLEHN")),
    bind=lambda cell, model, given: functools.partial(model, given["input_features"]),
    **_WHISPER,
)


def _by_definition(func: Any, args: Any, kwargs: Any) -> Any:
    """TabPFN chooses the kernels of PyTorch's attention in each call."""
    choice = sdpa_kernel(SDPBackend.MATH) if func is F.scaled_dot_product_attention else None
    with choice or contextlib.nullcontext():
        return func(*args, **kwargs)


@functools.cache
def _column_embeddings() -> Any:
    """Numbers of the package, whose file cannot be read while errors of rounding are simulated."""
    return import_module("tabpfn.architectures.shared.column_embeddings").load_column_embeddings()


class _TabPFN(LibraryModel):
    """A cell of the table is one token; attention is within rows, and then within columns."""

    @contextlib.contextmanager
    def serving(self, attention: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if attention == "eager":
                stack.enter_context(self.exactly())
            stack.enter_context(super().serving(attention))
            yield

    def build(self, cell: Cell) -> Any:
        architecture = import_module(self.CALLER)
        config = architecture.TabPFNV2p6Config(
            max_num_classes=10, emsize=cell["E"], nlayers=cell["N"], nhead=cell["H"]
        )
        with mock.patch.object(architecture, "load_column_embeddings", _column_embeddings):
            return architecture.get_architecture(config)

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        known = draw.normal(cell["L"], cell["B"], cell["C"])
        new = draw.normal(cell["S"], cell["B"], cell["C"])
        return {"known": known, "new": new, "classes": draw.integers(0, 10, cell["L"], cell["B"])}

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Forward:
        """The reference computes one column at a time, because all scores may not fit."""
        rows = torch.cat((given["known"], given["new"]))
        chunks = value_of(f"B * {_COLUMNS}", cell) if rows.dtype == torch.float64 else None
        options = import_module("tabpfn.architectures.interface").PerformanceOptions(chunks)
        classes = given["classes"].to(rows.dtype)
        return lambda: model(rows, classes, performance_options=options)

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[Part]:
        """Everything; the noise is that of the first 64 rows with classes and without."""
        return [{key: range(min(cell[key], 64)) for key in "LS"}] if few else [{}]

    def dims(self, cell: Cell, name: str, x: Tensor) -> list[str]:
        names = {"known": "LBC", "new": "SBC", "classes": "LB", "out": "SB_"}
        return [*names.get(name, "_" * x.dim())]


# Hollmann et al. 2025, https://doi.org/10.1038/s41586-024-08328-6, in version 2.6: 64 learned rows
# before all others; three features are one column, the classes another. Keys are the L rows with
# classes and the learned ones.
_ROWS, _COLUMNS = "(L + S + 64)", "((C + 2) // 3 + 1)"
_OF_CELL = "(L + S) * (6 * E * ((C + 2) // 3) + 2 * E)"
_OF_KEY = "N * 2 * E**2"
TABPFN = _TabPFN(
    FUNCTION="tabpfn.architectures.tabpfn_v2_6.TabPFNV2p6",
    ABOUT="N layers of width E, H heads; L rows with classes, S without, C features",
    PACKAGE="tabpfn",
    INSTALL="pip install fastattn[tabpfn]",
    CALLER="tabpfn.architectures.tabpfn_v2_6",
    exactly=functools.partial(Intercepting, _by_definition),
    SIZES={"B": 1, "L": 1000, "S": 100, "C": 20, "N": 24, "E": 192, "H": 3},
    PASSES=("fwd",),
    LENGTH=f"{_ROWS} * {_COLUMNS}",
    LAYER="10 * E**2",
    PAIRS=f"B * {_COLUMNS} * {_ROWS} * ({_COLUMNS} + L + 64)",
    OTHER=(
        f"{_OF_KEY} + 8*E + E**2 // 4 + 2*E * (E + 10)",
        f"B * (L + 64) * {_COLUMNS} * {_OF_KEY} + B * {_OF_CELL}"
        " + (C + 2) // 3 * (E // 4) * E + B * S * 2*E * (E + 10)",
    ),
    ITEMS=("B * (L + S)", "rows"),
)
