"""``replace_mha`` and ``restore_mha``: our kernels are reached, and nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import (
    replace_mha,
    restore_mha,
    scaled_dot_product_attention,
    varlen_attention,
)
from fastattn.nn import MultiheadAttention, _nested, _small, mha

EMBED, HEADS = 16, 4
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 3 + [True] * 3])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[str]:
    """The backend of each attention call; it is forced, so a call that it cannot run raises."""
    names: list[str] = []

    def counted(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            names.append(backend)
            return function(*args, **keywords)

        return call

    for module in (mha, _nested):
        attend = counted(scaled_dot_product_attention)
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(_nested, "varlen_attention", counted(varlen_attention))
    monkeypatch.setattr(_small, "_BACKENDS", ())  # small layers call the function, too
    return names


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        EMBED, HEADS, 32, dropout=0.0, **{"batch_first": True, **options}
    )


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(**options), 2, norm=nn.LayerNorm(EMBED))


def decoder(**options: Any) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerDecoder(layer, 2)


SOURCE, TARGET = torch.randn(3, 6, EMBED), torch.randn(3, 5, EMBED)
FUTURE = nn.Transformer.generate_square_subsequent_mask(5)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int]] = {
    "encoder layer": (encoder_layer, lambda m: m(SOURCE), 1),
    "encoder layer, norm first": (
        lambda: encoder_layer(norm_first=True, activation="gelu"),
        lambda m: m(SOURCE),
        1,
    ),
    "encoder layer, padding": (encoder_layer, lambda m: m(SOURCE, src_key_padding_mask=PADDING), 1),
    "encoder layer, causal": (encoder_layer, lambda m: m(SOURCE, CAUSAL, is_causal=True), 1),
    "encoder layer, sequence first": (
        lambda: encoder_layer(batch_first=False),
        lambda m: m(SOURCE.transpose(0, 1)).transpose(0, 1),
        1,
    ),
    "encoder": (encoder, lambda m: m(SOURCE), 2),
    "encoder, padding": (encoder, lambda m: m(SOURCE, src_key_padding_mask=PADDING), 2),
    "encoder, padding and causal": (
        encoder,
        lambda m: m(SOURCE, mask=CAUSAL, src_key_padding_mask=PADDING.float() * -1e30),
        2,
    ),
    "decoder": (
        decoder,
        lambda m: m(
            TARGET, SOURCE, tgt_mask=FUTURE, tgt_is_causal=True, memory_key_padding_mask=PADDING
        ),
        4,
    ),
    "transformer": (
        lambda: nn.Transformer(EMBED, HEADS, 2, 2, 32, dropout=0.0, batch_first=True),
        lambda m: m(
            SOURCE,
            TARGET,
            tgt_mask=FUTURE,
            src_key_padding_mask=PADDING,
            memory_key_padding_mask=PADDING,
        ),
        6,
    ),
}
MODES = ["train", "eval", "no_grad", "inference"]


def in_mode(mode: str, model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Tensor:
    """Run a model in the mode "train", "eval", "no_grad" or "inference"."""
    model.train(mode == "train")
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(
        mode, torch.enable_grad
    )
    with context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about nested tensors, and about nesting
        return run(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_reaches_our_kernel_in_every_mode(name: str, mode: str, calls: list[str]) -> None:
    build, run, attentions = MODELS[name]
    torch.manual_seed(0)
    model = build()
    want = in_mode(mode, model, run)
    assert not calls
    assert len(replace_mha(model)) == attentions
    got = in_mode(mode, model, run)
    assert len(calls) == attentions
    assert torch.allclose(got, want, atol=2e-6)
    calls.clear()
    assert len(restore_mha(model)) == attentions
    assert torch.equal(in_mode(mode, model, run), want)
    assert not calls


def test_a_model_built_with_our_module_reaches_the_kernel(calls: list[str]) -> None:
    layer = encoder_layer().eval()
    layer.self_attn = MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    with torch.no_grad():
        layer(SOURCE)
    assert len(calls) == 1
    assert replace_mha(layer) == restore_mha(layer) == []
    assert type(layer.self_attn) is MultiheadAttention


def test_names_and_idempotence() -> None:
    model = nn.Transformer(EMBED, HEADS, 1, 1, 32)
    names = [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    assert replace_mha(model) == names
    assert replace_mha(model) == []
    assert all(type(model.get_submodule(name)) is MultiheadAttention for name in names)
    assert all(isinstance(model.get_submodule(name), nn.MultiheadAttention) for name in names)
    assert restore_mha(model) == names
    assert restore_mha(model) == []
    assert all(type(model.get_submodule(name)) is nn.MultiheadAttention for name in names)


def test_a_shared_module_stays_shared() -> None:
    attention = nn.MultiheadAttention(EMBED, HEADS)
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention])})
    assert replace_mha(model) == ["a"]
    assert model["a"] is model["b"][0] is attention
    assert restore_mha(model) == ["a"]


def test_keeps_everything_else() -> None:
    """Objects, not copies: an optimizer or a closure made before stays valid."""
    module = nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True).eval()
    module.note = {"client": 1}
    module.register_buffer("extra", torch.ones(2))
    module.in_proj_weight.requires_grad_(False)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = dict(module.__dict__)
    hooks = {k: dict(v) for k, v in before.items() if "hooks" in k}
    parameters = dict(module.named_parameters())
    state = copy.deepcopy(module.state_dict())

    replace_mha(module)
    assert {k: id(v) for k, v in module.named_parameters()} == {
        k: id(v) for k, v in parameters.items()
    }
    assert module.state_dict().keys() == state.keys()
    assert not module.training
    assert module.note == {"client": 1}
    x = torch.randn(5, 2, EMBED, requires_grad=True)
    module(x, x, x)[0].sum().backward()
    assert seen == ["before", "after", "backward"]

    restore_mha(module)
    assert module.__dict__.keys() == before.keys()
    assert all(module.__dict__[k] is v for k, v in before.items())
    assert {k: dict(v) for k, v in module.__dict__.items() if "hooks" in k} == hooks


class Client(nn.MultiheadAttention):
    """A subclass as clients write them: own state, own signature, and a call of super."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.gain * super().forward(x, x, x, need_weights=False)[0]


class Stranger(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + 1


def test_a_subclass_keeps_its_methods_on_our_kernel(calls: list[str]) -> None:
    module = Client(EMBED, HEADS)
    x = torch.randn(5, 2, EMBED)
    want = module(x)
    assert not calls
    assert replace_mha(module) == [""]
    assert isinstance(module, Client)
    assert isinstance(module, MultiheadAttention)
    assert type(module).__qualname__ == "Client"
    assert torch.allclose(module(x), want, atol=1e-6)
    assert len(calls) == 1
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for other in copies:
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
        assert restore_mha(other) == [""]
        assert type(other) is Client
        assert torch.equal(other(x), want)
    assert restore_mha(module) == [""]
    assert type(module) is Client


def test_a_subclass_with_its_own_computation_keeps_it(calls: list[str]) -> None:
    module = Stranger(EMBED, HEADS)
    assert replace_mha(module) == [""]
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    assert not calls
    restore_mha(module)
    assert type(module) is Stranger


def test_replaced_models_are_copied_and_saved(calls: list[str]) -> None:
    model = encoder()
    replace_mha(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        with torch.no_grad():
            assert torch.equal(other.eval()(SOURCE), model.eval()(SOURCE))
        assert len(calls) == 4
        calls.clear()
        assert restore_mha(other) == ["layers.0.self_attn", "layers.1.self_attn"]
        assert type(other.layers[0].self_attn) is nn.MultiheadAttention


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("cls", [nn.MultiheadAttention, Client])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("removed", ["replaced", "restored", "never"])
def test_parametrizations_survive(when: str, removed: str, cls: Any, calls: list[str]) -> None:
    parametrize = nn.utils.parametrize
    module = cls(EMBED, HEADS)
    x = torch.randn(5, 2, EMBED)

    def run() -> Tensor:
        return module(x) if cls is Client else module(x, x, x)[0]

    if when == "before":
        parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    assert replace_mha(module) == [""]
    if when == "after":
        parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    ours = run()
    assert len(calls) == 1
    if removed == "replaced":
        parametrize.remove_parametrizations(module, "in_proj_weight")
        assert torch.equal(run(), ours)
        assert isinstance(module, MultiheadAttention)
    assert restore_mha(module) == [""]
    assert not isinstance(module, MultiheadAttention)
    calls.clear()
    assert torch.allclose(run(), ours, atol=1e-6)
    assert not calls
    if removed == "restored":
        parametrize.remove_parametrizations(module, "in_proj_weight")
    assert (type(module) is cls) == (removed != "never")


def test_a_patched_torch_does_not_recurse(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder in (nn, nn.modules, nn.modules.activation, nn.modules.transformer):
        monkeypatch.setattr(holder, "MultiheadAttention", MultiheadAttention)
    layer = encoder_layer()
    assert type(layer.self_attn) is MultiheadAttention
    assert layer(SOURCE).shape == SOURCE.shape
    assert replace_mha(layer) == []
