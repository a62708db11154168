"""TabPFN's architectures with random weights, on PyTorch's attention and on ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from libraries import library
from library_models import TABPFN, tabpfn_model
from torch import Tensor, nn
from transformers_runs import assert_same

import fastattn

TRAINED = 30


@pytest.fixture(params=TABPFN)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return tabpfn_model(request.param)


def register() -> Any:
    from fastattn.integrations import tabpfn

    return tabpfn.register()


def registry() -> Any:
    return library("tabpfn.architectures.shared.attention_backends")


def table(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Features [rows, 1, columns], and the classes [TRAINED, 1] of the first rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TRAINED + 10, 1, 7, generator=generator, dtype=torch.float64)
    return x.to(dtype), (torch.arange(TRAINED)[:, None] % 3).to(dtype)


def test_predictions_and_gradients(model: nn.Module) -> None:
    def run() -> dict[str, Tensor]:
        model.zero_grad()
        out = model(*table(), task_type="multiclass")
        out.square().sum().backward()
        named = model.named_parameters()
        grads = {f"gradient of {name}": p.grad for name, p in named if p.grad is not None}
        return {"out": out.detach()} | grads

    want = run()
    with register(), registry().recorded_attention_backends() as backends:
        got = run()
    assert_same(got, want)
    assert {getattr(backend, "name", None) for backend in backends} == {"fastattn"}


def test_predictions_with_a_cache(model: nn.Module) -> None:
    x, y = table()
    with torch.no_grad():
        want = model(x, y, task_type="multiclass")
        with register(), fastattn.trace() as calls:
            _, cache = model(x, y, task_type="multiclass", return_kv_cache=True)
            options = {"kv_cache": cache, "x_is_test_only": True}
            got = model(x[TRAINED:], y, task_type="multiclass", **options)
    assert_same({"out": got}, {"out": want})
    assert calls
    assert all(call.backend == "cpu" for call in calls)


def test_accelerated_in_16_bits(model: nn.Module) -> None:
    """With our linear layers, too. Rounded results differ, with errors as small as stock's."""
    with torch.no_grad():
        exact = model(*table(), task_type="multiclass")
        stock = model.bfloat16()(*table(torch.bfloat16), task_type="multiclass")
        fastattn.accelerate(model)
        with register():
            ours = model(*table(torch.bfloat16), task_type="multiclass")
        fastattn.restore(model)
    assert (ours - exact).abs().max() < 2 * (stock - exact).abs().max()


def test_registrations_end_in_any_order() -> None:
    backends = registry()
    before = backends.registered_attention_backends()
    first, second = register(), register()
    assert backends.registered_attention_backends()[0].name == "fastattn"
    first.undo()
    first.undo()
    assert backends.registered_attention_backends()[0].name == "fastattn"
    second.undo()
    assert backends.registered_attention_backends() == before


def test_other_devices_are_left_alone() -> None:
    spec = {"device": torch.device("cuda"), "dtype": torch.float32, "batch_size": 1, "head_dim": 64}
    sizes = dict.fromkeys(("seq_len_q", "seq_len_kv", "num_heads", "num_kv_heads"), 8)
    with register():
        (ours, *_) = registry().registered_attention_backends()
        assert not ours.is_preferred(registry().AttentionSpec(**spec, **sizes))


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.integrations import tabpfn

    monkeypatch.setattr(library("tabpfn"), "__version__", "2.2.1")
    tabpfn._registry.cache_clear()
    with pytest.raises(ImportError, match=r"tabpfn>=9\.0,<10.*tabpfn 2\.2\.1 is installed"):
        tabpfn.register()
