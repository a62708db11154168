"""Self-attention in one native call: right, and only for eligible calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from within_bound import assert_right

import fastattn
from fastattn import dispatch
from fastattn.nn import _small
from fastattn.testing.targets import Target, targets

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(not targets(), reason="no native core")


# -- self-attention in one call -------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the native call was made, and served the layer."""
    backend, made = dispatch.load("cpu"), []
    native = backend.self_attention

    def counted(*args: object, **named: object) -> Tensor | None:
        result = native(*args, **named)
        if result is not None:
            made.append(1)
        return result

    monkeypatch.setattr(backend, "self_attention", counted)
    return made


def module_of(dtype: torch.dtype = torch.float32, **options: object) -> fastattn.MultiheadAttention:
    """A module of three heads in evaluation mode, with random biases."""
    torch.manual_seed(0)
    module = fastattn.MultiheadAttention(24, 3, dtype=dtype, **options).eval()
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", targets(), ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
def test_equals_the_definition(
    mask: str, bias: bool, batch_first: bool, target: Target, dtype: torch.dtype, calls: list[int]
) -> None:
    module = module_of(dtype, batch_first=batch_first, bias=bias)
    shape = (3, 19, 24) if batch_first else (19, 3, 24)
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    options: dict[str, object] = {}
    if mask == "padding":
        options["key_padding_mask"] = torch.arange(19) >= torch.tensor([[19], [7], [1]])
    elif mask == "causal":
        options["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(19, dtype=dtype)
        options["is_causal"] = True
    with torch.no_grad(), target.active():
        y, weights = module(x, x, x, need_weights=False, **options)
        assert calls == [1]
        assert weights is None
        wide = copy.deepcopy(module).double()
        assert y.is_contiguous()
        assert_right({"y": y}, lambda: {"y": self_attention(wide, x.double(), options)})


def self_attention(module: nn.MultiheadAttention, x: Tensor, options: dict[str, object]) -> Tensor:
    """The definition, in plain PyTorch."""
    rows = x if module.batch_first else x.transpose(0, 1)
    n, length, width = rows.shape
    packed = F.linear(rows, module.in_proj_weight, module.in_proj_bias)
    q, k, v = packed.view(n, length, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
    visible = torch.ones(length, length, dtype=torch.bool)
    if "attn_mask" in options:
        visible = visible.tril()
    if "key_padding_mask" in options:
        visible = visible & ~options["key_padding_mask"][:, None, None, :]
    scores = (q @ k.mT) * (width // 3) ** -0.5
    out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
    out = F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return out if module.batch_first else out.transpose(0, 1)


def test_a_sequence_of_padding_alone_gives_the_bias_of_the_output(calls: list[int]) -> None:
    module = module_of(batch_first=True)
    x = torch.randn(2, 5, 24)
    padding = torch.tensor([[False] * 5, [True] * 5])
    with torch.no_grad():
        y, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert calls
    assert torch.equal(y[1], module.out_proj.bias.expand(5, 24))


def test_padded_rows_do_not_affect_the_result(calls: list[int]) -> None:
    module = module_of(batch_first=True)
    x = torch.randn(2, 6, 24)
    padding = torch.arange(6).expand(2, 6) >= 4
    with torch.no_grad():
        clean, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
        x[:, 4:] = float("nan")
        dirty, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert len(calls) == 2
    assert torch.equal(clean[:, :4], dirty[:, :4])


def attend(module: nn.Module, *tensors: Tensor, **options: Any) -> Any:
    """Self-attention of one tensor, or attention of three, without weights."""
    query, key, value = tensors if len(tensors) == 3 else 3 * tensors
    return module(query, key, value, need_weights=False, **options)


def within(context: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Any]:
    """A use of the module within a context."""

    def use(module: nn.Module, x: Tensor) -> None:
        with context():
            y = attend(module, x)[0]
            if y.requires_grad:
                y.sum().backward()

    return use


USES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "weights": lambda module, x: module(x, x, x),
    "a gradient": within(torch.enable_grad),
    "other tensors": lambda module, x: attend(module, x, x.clone(), x),
    "dropout": lambda module, x: (setattr(module, "dropout", 0.5), attend(module.train(), x)),
    "a forced backend": within(lambda: fastattn.use_backend("reference")),
    "parametrized": lambda module, x: (
        parametrizations.weight_norm(module, "in_proj_weight"), attend(module, x)
    ),
    "pruned": lambda module, x: (
        prune.random_unstructured(module, "in_proj_weight", amount=0.5), attend(module, x)
    ),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "floating padding": lambda module, x: attend(
        module, x, key_padding_mask=torch.zeros(x.shape[:2])
    ),
    "a mask": lambda module, x: attend(module, x, attn_mask=torch.zeros(2 * x.shape[1:2])),
    "strides": lambda module, x: attend(module, x.expand(4, -1, -1)),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_ineligible_calls_take_the_general_path(
    use: Callable[[nn.Module, Tensor], None], calls: list[int]
) -> None:
    module, x = module_of(batch_first=True), torch.randn(1, 5, 24)
    with torch.no_grad():
        module(x, x, x, need_weights=False)
        assert calls == [1]
        use(module, x)
    assert calls == [1]


def test_large_sizes_take_the_general_path(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = module_of(batch_first=True), torch.randn(1, 9, 24)
    with torch.no_grad():
        monkeypatch.setattr(_small, "_work_limit", lambda dtype: 3 * 9 * 24 * 24 - 1)
        module(x, x, x, need_weights=False)
        assert not calls
        monkeypatch.setattr(_small, "_work_limit", lambda dtype: 3 * 9 * 24 * 24)
        module(x, x, x, need_weights=False)
        assert calls


def test_reads_the_weights_at_every_call(calls: list[int]) -> None:
    module, x = module_of(batch_first=True), torch.randn(2, 5, 24)
    with torch.no_grad():
        module(x, x, x, need_weights=False)
        module.out_proj.weight.zero_()
        y, _ = module(x, x, x, need_weights=False)
    assert len(calls) == 2
    assert torch.equal(y, module.out_proj.bias.expand(2, 5, 24))
