"""Small float64 calls of each module, as functions of its inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batched_cases import TOKENS, Case, lower, rand
from torch import Tensor, nn

import fastattn

LAST_MASKED = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
CROSS = (2, 3, 4), (2, 2, 4), (2, 2, 4)
SIZES: dict[str, Any] = {"d_model": 4, "nhead": 2, "dim_feedforward": 5, "batch_first": True}


def of_module(module: nn.Module, *tensors: Tensor, **options: Any) -> Case:
    """The module as a function of these tensors and of its parameters."""
    module = module.double()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    parameters = tuple(dict(module.named_parameters())[name] for name in names)

    def call(*x: Tensor) -> Any:
        given = dict(zip(names, x[len(tensors) :], strict=True))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            found = torch.func.functional_call(module, given, x[: len(tensors)], options)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(y for y in found if y is not None)

    return call, (*tensors, *(p.detach().clone().requires_grad_() for p in parameters))


class Called(nn.Module):
    """A module whose forward calls ``function(module, *tensors)``."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *x: Tensor) -> Any:
        return self.function(self.module, *x)


def mha(*sizes: tuple[int, ...], options: dict[str, Any] | None = None, **more: Any) -> Case:
    """Attention of tensors of the given sizes."""
    module = fastattn.MultiheadAttention(4, 2, batch_first=True, **(options or {}))
    return of_module(module, *(rand(*size) for size in sizes), **more)


def attending(module: nn.Module, x: Tensor) -> Tensor:
    """Self-attention: one tensor as query, key and value."""
    return module(x, x, x, key_padding_mask=LAST_MASKED, need_weights=False)[0]


def self_attention(**options: Any) -> Case:
    module = fastattn.MultiheadAttention(4, 2, batch_first=True, **options)
    return of_module(Called(module, attending), rand(2, 3, 4))


def masked_by_floats() -> Case:
    """Attention with a mask that is added."""
    module = Called(
        fastattn.MultiheadAttention(4, 2, batch_first=True),
        lambda module, x, mask: module(x, x, x, attn_mask=mask, need_weights=False)[0],
    )
    return of_module(module, rand(2, 3, 4), rand(3, 3))


def encoder_layer(**options: Any) -> nn.Module:
    return fastattn.nn.TransformerEncoderLayer(**SIZES, **options)


def decoder_layer() -> nn.Module:
    return fastattn.nn.TransformerDecoderLayer(**SIZES, dropout=0.0)


def transformer() -> Case:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = fastattn.nn.Transformer(**SIZES, **layers, dropout=0.0)
    return of_module(model, rand(1, 2, 4), rand(1, 3, 4))


def memn2n(**options: Any) -> Case:
    network = fastattn.nn.MemN2N(5, 3, hops=2, memory_size=3, **options)
    return of_module(Called(network, lambda network: network(TOKENS, TOKENS[:, 0])))


def key_value_memory() -> Case:
    """A memory that is extended and then read."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        memory = fastattn.nn.KeyValueMemory(4, 3, 2, batch_size=2, dtype=torch.float64)
        memory.append(key, value)
        return memory(query, need_weights=True)

    return call, (rand(2, 2, 3), rand(2, 3, 3), rand(2, 3, 2))


def hopfield(**options: Any) -> Case:
    """An association of a tensor with itself."""
    module = Called(
        fastattn.nn.Hopfield(4, **options),
        lambda module, x: module(x, stored_pattern_padding_mask=LAST_MASKED),
    )
    return of_module(module, rand(2, 3, 4))


def luong(**options: Any) -> Case:
    module = fastattn.nn.LuongAttention(4, 4, **options)
    return of_module(module, rand(2, 3, 4), rand(2, 5, 4))


ours = fastattn.nn
MODULES: dict[str, Callable[[], Case]] = {
    "mha-self": self_attention,
    "mha-cross": lambda: mha(*CROSS),
    "mha-unbatched": lambda: mha((3, 4), (2, 4), (2, 4), need_weights=False),
    "mha-widths": lambda: mha(
        *((2, 3, 4), (2, 2, 3), (2, 2, 5)),
        options={"kdim": 3, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True, "bias": True},
        average_attn_weights=False,
    ),
    "mha-dropout": lambda: mha(*CROSS, options={"dropout": 0.5}),
    "mha-nonlinear-heads": lambda: self_attention(nonlinear_heads=3),
    "mha-no-batch": lambda: mha((0, 3, 4), (0, 2, 4), (0, 2, 4)),
    "mha-float-mask": masked_by_floats,
    "encoder-layer": lambda: of_module(
        encoder_layer(dropout=0.0), rand(2, 3, 4), src_key_padding_mask=LAST_MASKED
    ),
    "encoder-layer-dropout": lambda: of_module(
        encoder_layer(dropout=0.5, norm_first=True), rand(2, 3, 4)
    ),
    "encoder": lambda: of_module(
        ours.TransformerEncoder(encoder_layer(dropout=0.0, activation="gelu"), 2),
        rand(2, 3, 4),
        is_causal=None,
    ),
    "decoder-layer": lambda: of_module(
        decoder_layer(), rand(2, 3, 4), rand(2, 2, 4), tgt_mask=~lower(3, 3)
    ),
    "decoder": lambda: of_module(
        ours.TransformerDecoder(decoder_layer(), 1), rand(2, 3, 4), rand(2, 2, 4)
    ),
    "transformer": transformer,
    "memn2n": memn2n,
    "memn2n-layerwise": lambda: memn2n(weight_tying="layerwise"),
    "key-value-memory": key_value_memory,
    "hopfield-association": lambda: hopfield(hidden_size=2, num_heads=2, update_steps_max=2),
    "hopfield-association-implicit": lambda: hopfield(
        update_steps_max=None, grad="implicit", scaling=0.5
    ),
    "hopfield-layer": lambda: of_module(ours.HopfieldLayer(4, quantity=3), rand(2, 3, 4)),
    "hopfield-pooling": lambda: of_module(ours.HopfieldPooling(4, quantity=2), rand(2, 3, 4)),
    "additive-module": lambda: of_module(
        ours.AdditiveAttention(dim=4), rand(2, 3, 4), rand(2, 2, 4), use_causal_mask=True
    ),
    "bahdanau": lambda: of_module(
        ours.BahdanauAttention(3, True, query_size=4, memory_size=5), rand(2, 3, 4), rand(2, 2, 5)
    ),
    "luong-module": luong,
    "luong-module-concat": lambda: luong(method="concat", dropout=0.5),
    "luong-module-local": lambda: luong(window="local-p", D=1),
    "global-attention": lambda: of_module(
        ours.GlobalAttention(4, attn_type="mlp"), rand(2, 3, 4), rand(2, 2, 4)
    ),
    "sinusoids": lambda: of_module(
        ours.SinusoidalPositionalEncoding(4, scale="sqrt_dim"), rand(2, 3, 4)
    ),
    "learned-positions": lambda: of_module(ours.LearnedPositionalEncoding(5, 4), rand(2, 3, 4)),
    "head-network": lambda: of_module(ours.HeadNetwork(2, 3, 4), rand(2, 2, 3, 3)),
}
