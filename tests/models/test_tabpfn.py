"""TabPFN's architectures with random weights, on PyTorch's attention and on ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gemms import cpu, native_layers
from libraries import library
from library_models import TABPFN, tabpfn_model
from torch import Tensor, nn
from transformers_runs import assert_same
from within_bound import assert_right

import fastattn
from fastattn.bench.models import TABPFN as TABPFN_BY_DEFINITION

TRAINED = 30


@pytest.fixture(params=TABPFN)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return tabpfn_model(request.param)


def register() -> Any:
    """Register fastattn with TabPFN."""
    registry()  # from here on it can be imported
    from fastattn.integrations import tabpfn

    return tabpfn.register()


def registry() -> Any:
    """TabPFN's registry of attention functions."""
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


# Tables, rows, columns and rows with classes: tasks of several columns, and of a few of their rows.
SHAPES = ((2, 5, 3, 4), (1, 600, 2, 530), (2, 3, 300, 2), (1, 7, 1, 7))


@pytest.fixture(params=["v2_5", "v2_6"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    return tabpfn_model(request.param).blocks[0]  # type: ignore[index]


@pytest.fixture
def native() -> Iterator[mock.Mock]:
    """Counts the native calls; layers of any size take them, on any processor."""
    with native_layers(), mock.patch.object(cpu, "table_layer", wraps=cpu.table_layer) as called:
        yield called


def cells(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random embeddings of cells."""
    return torch.randn(*shape, 192, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_layer(
    shape: tuple[int, ...], dtype: torch.dtype, block: nn.Module, native: mock.Mock
) -> None:
    """And the keys and values of its cache, with which new rows have the same bits."""
    *sizes, known = shape
    block, x = block.to(dtype), cells(*sizes, dtype=dtype)
    exact = copy.deepcopy(block).double()
    fastattn.accelerate(block)

    def results(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y, cache = layer([x], known, None, return_kv=True)
        return {"y": y, "key": cache.key, "value": cache.value}

    got = results(block, x)
    assert torch.equal(block(x, known, None)[0], got["y"])
    cache = library("tabpfn.architectures.kv_cache").KVCacheEntry(got["key"], got["value"])
    new = block(x[:, known:].contiguous(), 0, None, cached_kv=cache)[0]
    assert torch.equal(new, got["y"][:, known:])
    assert native.call_count == 3
    assert torch.equal(block([in_place := x.clone()], known, 8)[0], got["y"])
    assert torch.equal(in_place, got["y"])
    fastattn.restore(block)
    with TABPFN_BY_DEFINITION.serving("eager"):
        assert_right(got, lambda: results(exact, x.double()))


@torch.no_grad()
def test_bits_of_a_layer(block: nn.Module) -> None:
    """They depend on the table alone, not on threads or other tables."""
    fastattn.accelerate(block.float())
    x, threads = cells(3, 300, 2), torch.get_num_threads()
    want = torch.cat([block(each[None], 280, None)[0] for each in x])
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(block(x, 280, None)[0], want)
    finally:
        torch.set_num_threads(threads)


def test_layers_that_run_as_before(block: nn.Module, native: mock.Mock) -> None:
    """With gradients, unusual strides, hooks or parts that differ, and after `restore`."""
    stock, parts = type(block), block
    report = fastattn.accelerate(block.float())
    assert [(part.calls, part.backend) for part in report.layers] == [("a layer of tables", "cpu")]
    x = cells(1, 4, 3)
    wanted = block(x, 3, None)[0]
    assert wanted.requires_grad

    def same(x: Tensor = x) -> None:
        torch.testing.assert_close(block(x, 3, None)[0], wanted)

    with torch.no_grad():
        same(x.transpose(1, 2).contiguous().transpose(1, 2))
        first: Any = parts.mlp[0]  # type: ignore[index]
        first.weight = nn.Parameter(first.weight.t().contiguous().t())
        same()
        before = native.call_count
        handle = first.register_forward_hook(lambda *_: None)
        same()
        assert "watched by a hook" in block.why_not_native()  # type: ignore[operator]
        handle.remove()
        parts.mlp[1] = nn.GELU(approximate="tanh")  # type: ignore[index, operator]
        block(x, 3, None)
        assert native.call_count == before
        parts.mlp[1] = nn.GELU()  # type: ignore[index, operator]
        same()
        assert native.call_count == before + 1
    fastattn.restore(block)
    assert type(block) is stock


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
