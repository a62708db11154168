"""Attributes of modules that users change after construction: as in PyTorch, or a clear error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fastattn
from fastattn.backends.primitives import AttentionOptions, HopfieldOptions

NUMBERS = (0, 2, 3, 17, 32, -4, 2**31, 2**63 - 1, 2**63, 4.0, float("nan"))
VALUES = (*NUMBERS, "4", None, True, torch.tensor(4), nn.Identity())
# What PyTorch's own modules raise.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

Forward = Callable[[Any], Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors_of(results: Any) -> list[Tensor]:
    """All tensors in the results of a module."""
    if isinstance(results, Tensor):
        return [results]
    return [] if results is None else [x for part in results for x in tensors_of(part)]


def outcome(module: nn.Module, forward: Forward) -> list[Tensor | None] | Exception:
    """The results and the gradients of the parameters, or the error."""
    torch.manual_seed(0)
    try:
        found: list[Any] = tensors_of(forward(module))
        parts = [x.double().sin().sum() for x in found if x.requires_grad]
        wanted = [x for x in module.parameters() if x.requires_grad]
        if parts and wanted:
            loss = torch.stack(parts).sum()
            found += torch.autograd.grad(loss, wanted, allow_unused=True)
    except ERRORS as error:
        return error
    return [x if x is None else x.detach().to_dense() for x in found]


def assert_same_outcome(ours: Any, expected: Any, what: str) -> None:
    """Both must be the same results, or errors of the same type."""
    if isinstance(expected, Exception):
        assert type(ours) is type(expected), f"{what}: {ours!r} instead of {expected!r}"
        return
    assert not isinstance(ours, Exception), f"{what}: {ours!r} instead of a result"
    for x, y in zip(ours, expected, strict=True):
        if x is not None or y is not None:
            torch.testing.assert_close(
                x, y, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text: f"{what}: {text}"
            )


def changed(module: nn.Module, name: str, value: Any, mode: str) -> nn.Module | None:
    """A copy with another value, None if it cannot be set; eval mode has no gradient."""
    module = copy.deepcopy(module)
    owner, _, attribute = name.rpartition(".")
    try:
        setattr(module.get_submodule(owner), attribute, copy.deepcopy(value))
    except TypeError:  # a parameter
        return None
    return module.train(mode == "train").requires_grad_(mode == "train")


@pytest.fixture(autouse=True)
def _without_the_fast_path_of_pytorch() -> Iterator[None]:
    """PyTorch's fast path raises other errors, and crashes with 0 heads."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


# -- multi-head attention ---------------------------------------------------------------------

X, Y = normal(2, 7, 16), normal(2, 5, 16)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
    "self": ({"batch_first": True}, (X, X, X)),
    "cross": ({"batch_first": True}, (X, Y, Y)),
    "other-widths": (
        {"batch_first": True, "kdim": 8, "vdim": 12},
        (X, normal(2, 5, 8), normal(2, 5, 12)),
    ),
    "appended": ({"add_bias_kv": True, "add_zero_attn": True}, (X, X, X)),
}
NAMES = "embed_dim num_heads head_dim kdim vdim batch_first add_zero_attn out_proj".split()
PARAMETERS = "in_proj_weight in_proj_bias q_proj_weight v_proj_weight out_proj.weight bias_k bias_v"


def attentions(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, nn.Module]:
    """PyTorch's module, the same one replaced, and ours, with the same parameters."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 4, **options)
    replaced, ours = copy.deepcopy(stock), fastattn.nn.MultiheadAttention(16, 4, **options)
    fastattn.replace_mha(replaced)
    ours.load_state_dict(stock.state_dict())
    return stock, replaced, ours


def assert_as_in_pytorch(name: str, value: Any, options: dict[str, Any], call: Any) -> None:
    """A module with a changed attribute must behave as PyTorch's does."""
    modules = attentions(options)
    for mode, need_weights in (("train", True), ("train", False), ("eval", False)):
        forward = functools.partial(attend, call=call, need_weights=need_weights)
        copies = [changed(module, name, value, mode) for module in modules]
        found = [outcome(module, forward) for module in copies if module is not None]
        for ours in found[1:]:
            assert_same_outcome(ours, found[0], f"{name} = {value!r} in {mode} mode")


def attend(module: Any, call: tuple[Tensor, ...], need_weights: bool) -> Any:
    return module(*call, need_weights=need_weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_attention_acts_as_in_pytorch(name: str, layout: str) -> None:
    for value in VALUES:
        assert_as_in_pytorch(name, value, *LAYOUTS[layout])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PARAMETERS.split())
def test_a_changed_parameter_acts_as_in_pytorch(name: str, layout: str) -> None:
    shapes = [(48, 16), (16, 16), (16, 12), (48,), (16,), (0,)]
    if name.startswith("bias"):
        shapes = [(1, 1, 16), (1, 1, 8), (16,), (0,)]
    for value in (None, *(nn.Parameter(normal(*shape)) for shape in shapes)):
        assert_as_in_pytorch(name, value, *LAYOUTS[layout])


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_changed_dropout_acts_as_in_pytorch_or_is_named(need_weights: bool) -> None:
    forward = functools.partial(attend, call=(X, X, X), need_weights=need_weights)
    for value in (*NUMBERS, -0.5, "4", None, True, [4]):
        modules = (changed(module, "dropout", value, "train") for module in attentions({}))
        expected, *found = (outcome(module, forward) for module in modules if module is not None)
        for ours in found:
            if type(ours) is not type(expected):
                assert "dropout_p must be between 0 and 1" in str(ours)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(module: Any) -> None:
    """Register parametrizations of the biases."""
    parametrize.register_parametrization(module, "in_proj_bias", Doubled())
    parametrize.register_parametrization(module.out_proj, "bias", Doubled())


def pruned(module: Any) -> None:
    """Prune half of the biases."""
    prune.l1_unstructured(module, "in_proj_bias", amount=0.5)
    prune.l1_unstructured(module.out_proj, "bias", amount=0.5)


def without_parameters(module: Any) -> None:
    """Replace the biases by plain tensors."""
    for owner, name in ((module, "in_proj_bias"), (module.out_proj, "bias")):
        value = owner._parameters.pop(name).data
        setattr(owner, name, value)


def with_appended_rows(module: Any) -> None:
    """Give the module a row that it appends to keys and values."""
    module.bias_k, module.bias_v = normal(1, 1, 16), normal(1, 1, 16)


@pytest.mark.parametrize("change", [parametrized, pruned, without_parameters, with_appended_rows])
def test_tensors_in_place_of_parameters_are_used(change: Callable[[Any], None]) -> None:
    found = []
    for module in attentions({}):
        for name, parameter in module.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        module.eval().requires_grad_(False)
        change(module)
        found.append(outcome(module, lambda m: m(X, X, X, need_weights=False)))
    for ours in found[1:]:
        assert_same_outcome(ours, found[0], change.__name__)


@pytest.mark.parametrize("heads", [0, 3, 17, 32, -4, 2**62])
def test_native_calls_check_what_they_divide_by(heads: int, native: ModuleType) -> None:
    message = f"must be positive and divide 16, got {heads}"
    tensors = torch.ones(2, 7, 16), torch.ones(48, 16), None, torch.ones(16, 16), None, None
    with pytest.raises(ValueError, match=f"num_heads {message}"):
        native.self_attention(*tensors, num_heads=heads, batch_first=True)
    options = AttentionOptions(scale=1.0)
    if 0 <= heads < 100:
        query, key = torch.ones(1, 16, 7, 8), torch.ones(1, 1, 9, 8).expand(1, heads, 9, 8)
        with pytest.raises(ValueError, match=f"heads of key {message}"):
            native.scaled_dot_product_attention(query, key, key, options=options)
    state, stored = torch.ones(1, 16, 8), torch.ones(1, 4, 8)
    options = HopfieldOptions(together=heads)
    with pytest.raises(ValueError, match=f"together {message}"):
        native.hopfield_retrieve(state, stored, options=options)


# -- the layers of a Transformer --------------------------------------------------------------

SIZES: dict[str, Any] = {
    "d_model": 16,
    "nhead": 4,
    "dim_feedforward": 8,
    "dropout": 0.0,
    "batch_first": True,
}
LAYERS: dict[str, tuple[Callable[[Any], nn.Module], Forward]] = {
    "encoder": (lambda of: of.TransformerEncoderLayer(**SIZES), lambda m: m(X)),
    "decoder": (lambda of: of.TransformerDecoderLayer(**SIZES), lambda m: m(X, Y)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_changed_layer_acts_as_in_pytorch(layer: str) -> None:
    make, forward = LAYERS[layer]
    torch.manual_seed(0)
    stock, ours = make(nn), make(fastattn.nn)
    ours.load_state_dict(stock.state_dict())
    names = ["norm_first", "activation", "linear1", "norm1", "dropout1", "self_attn"]
    names += [f"self_attn.{name}" for name in ("num_heads", "embed_dim", "bias_k", "batch_first")]
    for name in names:
        for n, value in enumerate(VALUES):
            mode = ("train", "eval")[n % 2]
            expected, mine = (changed(module, name, value, mode) for module in (stock, ours))
            if expected is not None and mine is not None:
                want = outcome(expected, forward)
                assert_same_outcome(outcome(mine, forward), want, f"{name} = {value!r}")
