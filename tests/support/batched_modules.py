"""Small float64 calls of each module, as functions of its inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batched_cases import TOKENS, Case, in_table, lower, rand
from torch import Tensor, nn

import fastattn

MODULES: dict[str, Callable[[], Case]] = {}


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


LAST_MASKED = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()


def mha(*sizes: tuple[int, ...], options: dict[str, Any] | None = None, **more: Any) -> Case:
    module = fastattn.MultiheadAttention(4, 2, batch_first=True, **(options or {}))
    return of_module(module, *(rand(*size) for size in sizes), **more)


def self_attention(**options: Any) -> Case:
    module = fastattn.MultiheadAttention(4, 2, batch_first=True, **options)
    call, tensors = of_module(Attending(module), rand(2, 3, 4))
    return call, tensors


class Attending(nn.Module):
    """Self-attention: one tensor as query, key and value."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=LAST_MASKED, need_weights=False)[0]


CROSS = (2, 3, 4), (2, 2, 4), (2, 2, 4)
MODULES["mha-self"] = self_attention
MODULES["mha-cross"] = lambda: mha(*CROSS)
MODULES["mha-unbatched"] = lambda: mha((3, 4), (2, 4), (2, 4), need_weights=False)
MODULES["mha-widths"] = lambda: mha(
    *((2, 3, 4), (2, 2, 3), (2, 2, 5)),
    options={"kdim": 3, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True, "bias": True},
    average_attn_weights=False,
)
MODULES["mha-dropout"] = lambda: mha(*CROSS, options={"dropout": 0.5})
MODULES["mha-nonlinear-heads"] = lambda: self_attention(nonlinear_heads=3)
MODULES["mha-no-batch"] = lambda: mha((0, 3, 4), (0, 2, 4), (0, 2, 4))


@in_table(MODULES)
def mha_float_mask() -> Case:
    module = fastattn.MultiheadAttention(4, 2, batch_first=True)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    return of_module(Masked(), rand(2, 3, 4), rand(3, 3))


SIZES: dict[str, Any] = {"d_model": 4, "nhead": 2, "dim_feedforward": 5, "batch_first": True}


@in_table(MODULES)
def encoder_layer() -> Case:
    layer = fastattn.nn.TransformerEncoderLayer(**SIZES, dropout=0.0)
    return of_module(layer, rand(2, 3, 4), src_key_padding_mask=LAST_MASKED)


@in_table(MODULES)
def encoder_layer_dropout() -> Case:
    layer = fastattn.nn.TransformerEncoderLayer(**SIZES, dropout=0.5, norm_first=True)
    return of_module(layer, rand(2, 3, 4))


@in_table(MODULES)
def encoder() -> Case:
    layer = fastattn.nn.TransformerEncoderLayer(**SIZES, dropout=0.0, activation="gelu")
    return of_module(fastattn.nn.TransformerEncoder(layer, 2), rand(2, 3, 4), is_causal=None)


@in_table(MODULES)
def decoder_layer() -> Case:
    layer = fastattn.nn.TransformerDecoderLayer(**SIZES, dropout=0.0)
    return of_module(layer, rand(2, 3, 4), rand(2, 2, 4), tgt_mask=~lower(3, 3))


@in_table(MODULES)
def decoder() -> Case:
    layer = fastattn.nn.TransformerDecoderLayer(**SIZES, dropout=0.0)
    return of_module(fastattn.nn.TransformerDecoder(layer, 1), rand(2, 3, 4), rand(2, 2, 4))


@in_table(MODULES)
def transformer() -> Case:
    model = fastattn.nn.Transformer(
        **SIZES, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0
    )
    return of_module(model, rand(1, 2, 4), rand(1, 3, 4))


@in_table(MODULES)
def memn2n() -> Case:
    network = fastattn.nn.MemN2N(5, 3, hops=2, memory_size=3)
    return of_module(Asked(network, TOKENS, TOKENS[:, 0]))


@in_table(MODULES)
def memn2n_layerwise() -> Case:
    network = fastattn.nn.MemN2N(5, 3, hops=2, memory_size=3, weight_tying="layerwise")
    return of_module(Asked(network, TOKENS, TOKENS[:, 0]))


class Asked(nn.Module):
    """A module of constant arguments."""

    def __init__(self, module: nn.Module, *arguments: Any) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments

    def forward(self) -> Any:
        return self.module(*self.arguments)


@in_table(MODULES)
def key_value_memory() -> Case:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        memory = fastattn.nn.KeyValueMemory(4, 3, 2, batch_size=2, dtype=torch.float64)
        memory.append(key, value)
        return memory(query, need_weights=True)

    return call, (rand(2, 2, 3), rand(2, 3, 3), rand(2, 3, 2))


@in_table(MODULES)
def hopfield_association() -> Case:
    module = fastattn.nn.Hopfield(4, hidden_size=2, num_heads=2, update_steps_max=2)
    return of_module(Stored(module), rand(2, 3, 4))


@in_table(MODULES)
def hopfield_association_implicit() -> Case:
    module = fastattn.nn.Hopfield(4, update_steps_max=None, grad="implicit", scaling=0.5)
    return of_module(Stored(module), rand(2, 3, 4))


class Stored(nn.Module):
    """An association of a tensor with itself."""

    def __init__(self, association: nn.Module) -> None:
        super().__init__()
        self.association = association

    def forward(self, x: Tensor) -> Tensor:
        return self.association(x, stored_pattern_padding_mask=LAST_MASKED)


@in_table(MODULES)
def hopfield_layer() -> Case:
    return of_module(fastattn.nn.HopfieldLayer(4, quantity=3), rand(2, 3, 4))


@in_table(MODULES)
def hopfield_pooling() -> Case:
    return of_module(fastattn.nn.HopfieldPooling(4, quantity=2), rand(2, 3, 4))


@in_table(MODULES)
def additive_module() -> Case:
    module = fastattn.nn.AdditiveAttention(dim=4)
    return of_module(module, rand(2, 3, 4), rand(2, 2, 4), use_causal_mask=True)


@in_table(MODULES)
def bahdanau() -> Case:
    module = fastattn.nn.BahdanauAttention(3, True, query_size=4, memory_size=5)
    return of_module(module, rand(2, 3, 4), rand(2, 2, 5))


def luong_module(**options: Any) -> Case:
    module = fastattn.nn.LuongAttention(4, 4, **options)
    return of_module(module, rand(2, 3, 4), rand(2, 5, 4))


MODULES["luong-module"] = luong_module
MODULES["luong-module-concat"] = lambda: luong_module(method="concat", dropout=0.5)
MODULES["luong-module-local"] = lambda: luong_module(window="local-p", D=1)


@in_table(MODULES)
def global_attention() -> Case:
    return of_module(fastattn.nn.GlobalAttention(4, attn_type="mlp"), rand(2, 3, 4), rand(2, 2, 4))


@in_table(MODULES)
def sinusoids() -> Case:
    return of_module(fastattn.nn.SinusoidalPositionalEncoding(4, scale="sqrt_dim"), rand(2, 3, 4))


@in_table(MODULES)
def learned_positions() -> Case:
    return of_module(fastattn.nn.LearnedPositionalEncoding(5, 4), rand(2, 3, 4))


@in_table(MODULES)
def head_network() -> Case:
    return of_module(fastattn.nn.HeadNetwork(2, 3, 4), rand(2, 2, 3, 3))
