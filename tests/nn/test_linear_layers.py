"""Linear layers of models: replaced by ours and restored, with hooks and parametrizations."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemms import only
from torch import Tensor, nn

import fastattn
from fastattn.nn import Linear
from fastattn.nn._replacement import replace_linear, restore
from fastattn.nn.linear import PatchEmbedding

X = torch.randn(9, 8)


class Inherits(nn.Linear):
    def extra(self) -> str:
        return "kept"


class Overrides(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), Inherits(6, 5, bias=False), nn.Linear(5, 4))


def restored(module: nn.Module) -> None:
    """Restore every part of a module by itself."""
    for part in module.modules():
        restore(part)


def test_the_class_is_replaced_and_restored() -> None:
    module, kinds = model(), [nn.Linear, nn.ReLU, Inherits, nn.Linear]
    parameters, state = list(module.parameters()), module.state_dict()
    want = module(X)
    assert replace_linear(module) == ["0", "2", "3"]
    assert replace_linear(module) == []
    assert [isinstance(x, Linear) for x in module] == [True, False, True, True]
    assert all(isinstance(x, nn.Linear) for x in (module[0], module[2]))
    assert module[2].extra() == "kept"  # type: ignore[operator]
    with only("ours") as called:
        assert torch.allclose(module(X), want, atol=1e-6)
    assert called == ["ours"] * 3
    assert all(x is y for x, y in zip(module.parameters(), parameters, strict=True))
    assert module.state_dict().keys() == state.keys()
    restored(module)
    assert [type(x) for x in module] == kinds
    assert torch.equal(module(X), want)
    assert all("_fastattn_replaced" not in x.__dict__ for x in module)


def test_restore_keeps_modules_constructed_as_fastattns() -> None:
    module = Linear(8, 4)
    assert replace_linear(module) == []
    assert not restore(module)
    assert type(module) is Linear


@pytest.mark.parametrize(
    "module",
    [
        Overrides(8, 4),
        nn.MultiheadAttention(8, 2),  # which reads the parameters of its out_proj
        nn.LazyLinear(4),
        nn.Linear(8, 4, device="meta"),
        nn.Bilinear(8, 8, 4),
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        nn.Conv2d(3, 4, 2, 2, padding=1),
        nn.Conv1d(3, 4, 2, 2),
    ],
)
def test_other_modules_stay(module: nn.Module) -> None:
    assert replace_linear(module) == []


def test_new_weights_are_used_at_once() -> None:
    """However they were replaced."""
    module, source = nn.Linear(8, 4), nn.Linear(8, 4)
    replace_linear(module)

    def is_like_stock() -> bool:
        with only("ours"):
            want = nn.functional.linear(X, module.weight, module.bias)
            return torch.allclose(module(X), want, atol=1e-5)

    assert is_like_stock()
    module.weight = nn.Parameter(torch.randn(4, 8))
    assert is_like_stock()
    module.weight.data = torch.randn(4, 8)
    assert is_like_stock()
    with torch.no_grad():
        module.weight.mul_(2)
    assert is_like_stock()
    module.load_state_dict(source.state_dict(), assign=True)
    assert is_like_stock()
    assert torch.allclose(module(X), source(X), atol=1e-6)
    module.weight = nn.Parameter(torch.randn(3, 8))  # of another size
    module.bias = None  # type: ignore[assignment]
    assert module(X).shape == (9, 3)
    module.double()
    assert module(X.double()).dtype == torch.float64


def test_hooks_and_parametrizations() -> None:
    parametrize = nn.utils.parametrize
    module, seen = nn.Linear(8, 4), []
    module.register_forward_hook(lambda *_: seen.append(1))
    want = 2 * module.weight @ X[0] + module.bias
    parametrize.register_parametrization(module, "weight", Doubled())
    assert replace_linear(module) == [""]
    assert torch.allclose(module(X)[0], want, atol=1e-5)
    assert restore(module)
    assert not isinstance(module, Linear)
    replace_linear(module)
    parametrize.remove_parametrizations(module, "weight")
    assert isinstance(module, Linear)
    assert restore(module)
    assert type(module) is nn.Linear
    assert torch.allclose(module(X)[0], want, atol=1e-5)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: _saved(module),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(again: Callable[[Any], Any]) -> None:
    module = model()
    want = module(X)
    replace_linear(module)
    other = again(module)
    assert [type(x) for x in other] == [type(x) for x in module]
    assert torch.allclose(other(X), want, atol=1e-6)
    restored(other)
    assert [type(x) for x in other] == [nn.Linear, nn.ReLU, Inherits, nn.Linear]


def _saved(module: nn.Module) -> Any:
    """The module after saving and loading."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_tied_weights_stay_tied() -> None:
    embedding, head = nn.Embedding(5, 8), nn.Linear(8, 5)
    head.weight = embedding.weight
    module = nn.Sequential(embedding, head)
    replace_linear(module)
    with only("ours"):
        module(torch.arange(5).repeat(2)).sum().backward()
    assert head.weight is embedding.weight
    parameters = (head.weight, head.bias)
    loss = nn.functional.linear(embedding.weight.repeat(2, 1), *parameters).sum()
    for x, want in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.allclose(x.grad, want, atol=1e-5)


def test_torchscript_has_pytorchs_linear() -> None:
    module = model()
    want = module(X)
    replace_linear(module)
    assert torch.equal(torch.jit.script(module)(X), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(12, 8), (14, 11)], ids=str)
def test_patches(size: tuple[int, int], dtype: torch.dtype) -> None:
    stock = nn.Conv2d(3, 10, (4, 2), (4, 2)).to(dtype)
    ours = copy.deepcopy(stock)
    assert replace_linear(ours) == [""]
    x = torch.randn(2, 3, *size).to(dtype)
    results = []
    for module in (stock, ours):
        leaf = x.clone().requires_grad_()
        with only("ours") as called:
            y = module(leaf)
            y.float().square().sum().backward()
        assert bool(called) == (module is ours and dtype != torch.float32)
        results.append([y, leaf.grad, module.weight.grad, module.bias.grad])
        assert y.is_contiguous()
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()))


def test_wrong_images_raise_pytorchs_errors() -> None:
    stock = nn.Conv2d(3, 10, 4, 4).bfloat16()
    ours = copy.deepcopy(stock)
    replace_linear(ours)
    for shape in ((2, 4, 8, 8), (2, 3, 3, 8), (8, 8)):
        texts = []
        for module in (stock, ours):
            with only("ours"), pytest.raises(RuntimeError) as caught:
                module(torch.randn(shape).bfloat16())
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    assert ours(torch.randn(3, 8, 8).bfloat16()).shape == (10, 2, 2)  # without a batch
    ours.stride = (2, 2)  # changed since
    with only("ours"):
        assert ours(torch.randn(1, 3, 8, 8).bfloat16()).shape == (1, 10, 3, 3)
    assert isinstance(ours, PatchEmbedding)


def test_accelerate_and_its_report() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    want = module(x)
    report = fastattn.accelerate(module)
    assert [(part.modules, part.kind) for part in report.linear] == [
        (("linear1", "linear2"), "Linear")
    ]
    assert "linear1, linear2" in str(report)
    with only("ours") as called:
        assert torch.allclose(module(x), want, atol=1e-5)
    assert len(called) == 4  # with the projections of the attention
    fastattn.restore(module)
    assert type(module.linear1) is nn.Linear
    report = fastattn.accelerate(module, linear=False)
    assert report.linear == ()
    assert type(module.linear1) is nn.Linear
    fastattn.restore(module)
    with pytest.raises(TypeError, match="linear must be a bool, got int"):
        fastattn.accelerate(module, linear=1)  # type: ignore[arg-type]


def test_the_report_names_dtypes_that_stay_pytorchs() -> None:
    module = nn.Linear(8, 4).double()
    (part,) = fastattn.accelerate(module).linear
    assert part.backend == ""
    assert "PyTorch's products are the fastest in float64" in part.reason
    fastattn.restore(module)
