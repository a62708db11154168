"""``accelerate(model, pack_weights=True)``: packed copies, and every change that drops them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemms import gemms, native_layers, only
from torch import Tensor, nn

import fastattn
from fastattn.nn.linear import PACKED

SIZES = N, K = 130, 140


@pytest.fixture(autouse=True)
def multiplied_by_tiles(chosen_tiles: str) -> Iterator[None]:
    with only("tiles"):
        yield


def packed_layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(K, N, dtype=dtype)
    fastattn.accelerate(layer, pack_weights=True)
    assert is_packed(layer)
    return layer


def is_packed(layer: nn.Module) -> bool:
    packed = layer.__dict__.get(PACKED)
    return packed is not None and packed.rows is not None


def assert_served(layer: nn.Linear, x: Tensor) -> None:
    """The bits of the kernel that packs the weight in the call."""
    with torch.no_grad():
        assert torch.equal(layer(x), gemms._by_tiles(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 47, 48, 300])
@pytest.mark.parametrize("threads_in_use", [1, 2])
def test_the_bits_of_a_packed_weight(
    rows: int, dtype: torch.dtype, threads_in_use: int, threads: Callable[[int], None]
) -> None:
    threads(threads_in_use)
    layer = packed_layer(dtype)
    assert_served(layer, torch.randn(rows, K, dtype=dtype))
    x = torch.randn(rows, 2 * K, dtype=dtype)[:, ::2]
    assert_served(layer, x)


def test_a_wide_weight() -> None:
    """Of more than one group of columns, and several blocks of the reduced index."""
    layer = nn.Linear(1100, 2100)
    fastattn.accelerate(layer, pack_weights=True)
    assert_served(layer, torch.randn(300, 1100))


def replace_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(N, K))


def add_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1)


def assign_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn(N, K)


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.randn(N, K), "bias": torch.randn(N)})


def load_assigned(layer: nn.Linear) -> None:
    state = {"weight": torch.randn(N, K), "bias": torch.randn(N)}
    layer.load_state_dict(state, assign=True)


def transpose_storage(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t().contiguous().t()


def resize(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(2 * N, K))
    layer.bias = nn.Parameter(torch.randn(2 * N))


@pytest.mark.parametrize(
    "change",
    [replace_weight, add_in_place, assign_data, load, load_assigned, transpose_storage, resize],
)
def test_a_changed_weight_is_used(change: Callable[[nn.Linear], None]) -> None:
    layer, x = packed_layer(), torch.randn(64, K)
    change(layer)
    with torch.no_grad():
        want = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
    assert not is_packed(layer)
    fastattn.accelerate(layer, pack_weights=True)
    assert is_packed(layer)
    assert_served(layer, x)


def test_another_dtype() -> None:
    layer = packed_layer().to(torch.float64)
    x = torch.randn(64, K, dtype=torch.float64)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not is_packed(layer)


def test_a_new_bias_needs_no_new_copy() -> None:
    layer = packed_layer()
    layer.bias = nn.Parameter(torch.randn(N))
    assert_served(layer, torch.randn(64, K))
    assert is_packed(layer)


def test_gradients() -> None:
    layer, x = packed_layer(), torch.randn(64, K, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_module_have_no_packed_weight(duplicate: Callable[[Any], Any]) -> None:
    layer = fastattn.nn.Linear(K, N)
    fastattn.accelerate(layer, pack_weights=True)
    assert is_packed(layer)
    other = duplicate(layer)
    assert not is_packed(other)
    x = torch.randn(64, K)
    torch.testing.assert_close(other(x), layer(x))


def test_autocast_runs_as_without() -> None:
    layer, x = packed_layer(), torch.randn(64, K)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [nn.Linear, fastattn.nn.Linear])
def test_restore_frees_the_copy(kind: type[nn.Linear]) -> None:
    layer = kind(K, N)
    fastattn.accelerate(layer, pack_weights=True)
    packed = layer.__dict__[PACKED]
    fastattn.restore(layer)
    assert PACKED not in layer.__dict__
    assert packed.rows is None  # whatever else refers to it
    assert type(layer) is kind


def test_the_report_names_the_bytes() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    (part,) = fastattn.accelerate(model, pack_weights=True).linear
    megabytes = 2 * 512 * 1024 * 6 / 1e6
    assert f"packed copies of {megabytes:.0f} MB" in part.reason


def test_without_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(weight: Tensor) -> Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 1 PB")

    monkeypatch.setattr(fastattn.dispatch.load("cpu"), "pack_weight", fails)
    layer = nn.Linear(K, N)
    (part,) = fastattn.accelerate(layer, pack_weights=True).linear
    assert "1 without: not enough memory" in part.reason
    assert not is_packed(layer)
    assert layer(torch.randn(64, K)).shape == (64, N)


@pytest.mark.parametrize("length", [25, 64])
def test_a_native_encoder_layer_reads_packed_weights(length: int) -> None:
    """With the bits of packing in the call, until a weight changes."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True).eval()
    x = torch.randn(2, length, 128)
    with native_layers("tiles") as called, torch.no_grad():
        fastattn.accelerate(layer)
        want = layer(x)
        fastattn.accelerate(layer, pack_weights=True)
        close(layer(x), want, exactly=length == 64)
        layer.linear1.weight.mul_(2)
        changed = layer(x)
        assert not is_packed(layer.linear1)
        assert is_packed(layer.linear2)
        fastattn.restore(layer)
        close(changed, layer(x))
        assert not torch.allclose(changed, want)
    assert len(called.layers) == 3


def close(got: Tensor, want: Tensor, *, exactly: bool = False) -> None:
    bound = 0.0 if exactly else 1e-4
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_bad_arguments() -> None:
    layer = nn.Linear(K, N)
    with pytest.raises(TypeError, match="pack_weights must be a bool, got int"):
        fastattn.accelerate(layer, pack_weights=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pack_weights=True needs linear=True"):
        fastattn.accelerate(layer, linear=False, pack_weights=True)
