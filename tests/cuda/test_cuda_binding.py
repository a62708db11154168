"""What the native module does with tensors before and after its kernels: which ones it takes, and
on which device and stream everything runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import compat, library
from fastattn.backends.primitives import (
    AdditiveBackwardOptions,
    AppendOptions,
    AttentionBackwardOptions,
    DecodeOptions,
    EncodeMemoryBackwardOptions,
    EncodeMemoryOptions,
    HopfieldBackwardOptions,
    MemoryHopBackwardOptions,
    NoOptions,
    SinusoidalOptions,
    VarlenOptions,
)

Call = Callable[[ModuleType], Any]


def attention(adapter: ModuleType) -> Any:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    mask = torch.randn(1, 1, 9, 9)
    options = AttentionBackwardOptions(scale=0.4, weights=1, needs_mask_grad=True)
    tensors = (query, key, value, mask, None, None)
    out, lse, weights = adapter.scaled_dot_product_attention(*tensors, options=options)
    grads = (torch.randn_like(out), None, torch.randn_like(weights))
    return adapter.scaled_dot_product_attention_backward(
        *grads, *tensors, out, lse, options=options
    )


def varlen(adapter: ModuleType) -> Any:
    query, key, value = torch.randn(3, 9, 4, 8)
    starts = torch.tensor([0, 4, 9])
    options = VarlenOptions(scale=0.4)
    tensors = (query, key, value, starts, starts, None, None)
    out, lse = adapter.varlen_attention(*tensors, options=options)
    return adapter.varlen_attention_backward(out, None, *tensors, out, lse, options=options)


def decode(adapter: ModuleType) -> Any:
    caches = torch.zeros(2, 2, 4, 16, 8)
    lengths = torch.tensor([3, 5])
    adapter.append_to_cache(*caches, *torch.randn(2, 2, 4, 1, 8), lengths, options=AppendOptions())
    query = torch.randn(2, 8, 1, 8)
    return adapter.decode_attention(query, *caches, lengths + 1, options=DecodeOptions(scale=0.4))


def additive(adapter: ModuleType) -> Any:
    query, key, value = torch.randn(3, 2, 5, 8)
    options = AdditiveBackwardOptions(weights=True)
    tensors = (query, key, value, torch.randn(8), torch.randn(8), None, None)
    out, weights = adapter.additive_attention(*tensors, options=options)
    return adapter.additive_attention_backward(out, weights, *tensors, options=options)


def memory_hops(adapter: ModuleType) -> Any:
    options = MemoryHopBackwardOptions(hops=2, needed=7)
    tensors = (*torch.randn(1, 2, 8), *torch.randn(2, 2, 9, 8), None, None, None)
    out, trace, stats, _ = adapter.memory_hop_attention(*tensors, options=options)
    return adapter.memory_hop_attention_backward(out, None, *tensors, trace, stats, options=options)


def hopfield(adapter: ModuleType) -> Any:
    options = HopfieldBackwardOptions(scale=0.4, steps_max=2, needed=3)
    tensors = (*torch.randn(1, 2, 3, 8), *torch.randn(1, 2, 9, 8), None, None, None)
    xi, taken, ends = adapter.hopfield_retrieve(*tensors, options=options)
    return adapter.hopfield_retrieve_backward(xi, *tensors, taken, ends, options=options)


def encode_memory(adapter: ModuleType) -> Any:
    tokens, factors = torch.randint(5, (1, 2, 3, 4)), torch.randn(4, 8)
    memories = adapter.encode_memory(
        tokens, torch.randn(1, 2, 5, 8), factors, torch.randn(1, 2, 3, 8),
        options=EncodeMemoryOptions(),
    )  # fmt: skip
    options = EncodeMemoryBackwardOptions(rows=5, temporal=True)
    return adapter.encode_memory_backward(memories, tokens, factors, options=options)


def merge_states(adapter: ModuleType) -> Any:
    (out_a, out_b), (lse_a, lse_b) = torch.randn(2, 2, 4, 7, 8), torch.randn(2, 2, 4, 7)
    states = (out_a, lse_a, out_b, lse_b)
    out, lse = adapter.merge_states(*states, options=NoOptions())
    return adapter.merge_states_backward(out, lse, *states, options=NoOptions())


def sinusoidal(adapter: ModuleType) -> Any:
    positions = torch.arange(5)
    return adapter.sinusoidal_encoding(torch.randn(2, 5, 8), positions, options=SinusoidalOptions())


CALLS: list[Call] = [
    *(attention, varlen, decode, additive, memory_hops, hopfield, encode_memory, merge_states),
    sinusoidal,
]
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def runs_at(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, device: int, stream: int) -> None:
    """The calls of the adapter are on this device and stream."""

    @contextlib.contextmanager
    def current(of: torch.device) -> Iterator[tuple[int, int]]:
        assert of == torch.device("cpu")  # the emulator's
        yield device, stream

    monkeypatch.setattr(adapter.operands, "current", current)


def test_native_functions_take_the_first_tensors_of_their_operators(adapter: ModuleType) -> None:
    compared = 0
    for operator in library.operators.values():
        function = getattr(adapter._cuda, operator.name, None)
        if function is None:
            continue
        parameters = inspect.signature(function).parameters
        tensors = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        own = ["order", "starts", "sentences"] if operator.name == "encode_memory_backward" else []
        assert tensors == [*operator.names[: len(tensors) - len(own)], *own], operator.name
        assert {"options", "place"} <= parameters.keys()
        compared += 1
    assert compared > 12


@each_call
def test_every_kernel_is_launched_on_the_stream_of_the_call(
    call: Call, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter._cuda.take_launches()
    adapter._cuda.take_streams()
    runs_at(adapter, monkeypatch, device=0, stream=0x5EED)
    call(adapter)
    assert adapter._cuda.take_streams() == {0x5EED}
    assert len(adapter._cuda.take_launches()) >= 1


@each_call
def test_tensors_of_another_device_are_refused(
    call: Call, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_at(adapter, monkeypatch, device=1, stream=0)
    adapter._cuda.take_launches()
    with pytest.raises(TypeError, match="must be a tensor in the memory of GPU 1, of at most 5"):
        call(adapter)
    assert not adapter._cuda.take_launches()
    monkeypatch.undo()
    call(adapter)  # the next call is on its own device again


def test_a_call_makes_the_device_of_its_tensor_current(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def device(of: torch.device) -> Iterator[None]:
        entered.append(of)
        yield
        entered.pop()

    def current_stream(of: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=7000 + of.index)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)

    def kernel(*tensors: Any, options: Any, place: Any) -> Any:
        return tensors, options, place, list(entered)

    tensor: Any = SimpleNamespace(device=torch.device("cuda", 3))
    launch = adapter.operands.launched(kernel)
    assert launch(None, tensor, options="options") == (
        (None, tensor),
        "options",
        (3, 7003),
        [tensor.device],
    )
    assert not entered


@pytest.fixture(params=["interface", "methods"])
def way(request: pytest.FixtureRequest, adapter: ModuleType) -> Iterator[None]:
    """How the module reads its tensors."""
    interface = compat.exchange_interface if request.param == "interface" else None
    if request.param == "interface" and interface is None:
        pytest.skip("this PyTorch has no exchange interface")
    adapter._cuda.use_torch(torch, interface, "cpu")
    yield
    adapter._cuda.use_torch(torch, compat.exchange_interface, "cpu")


@each_call
def test_tensors_are_read_in_either_way(call: Call, way: None, adapter: ModuleType) -> None:
    torch.manual_seed(0)
    got = call(adapter)
    adapter._cuda.use_torch(torch, compat.exchange_interface, "cpu")
    torch.manual_seed(0)
    want = call(adapter)
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x.double(), "the dtype must be float32, bfloat16 or float16"),
        ("query", lambda x: x[0], "query is not valid"),
        ("key", lambda x: x[..., :7], "key is not valid"),
        ("key", lambda x: x.half(), "key is not valid: it must be float32"),
        ("key", lambda x: x.to("meta"), "key must be a tensor in the memory of the CPU"),
        ("value", lambda x: x[:, :, :8], "value is not valid"),
        ("value", lambda x: x.tolist(), "value must be a tensor, got list"),
        ("attn_mask", lambda x: x[..., :8], "attn_mask is not valid: it must broadcast to"),
        ("attn_mask", lambda x: x.half(), "attn_mask is not valid: it must be bool or float32"),
        ("seed", lambda x: torch.tensor(1.0), "seed is not valid: it must be int64"),
        ("sinks", lambda x: torch.zeros(1, 3), "sinks is not valid: it must broadcast to"),
        ("sinks", lambda x: torch.zeros(1, 4).half(), "sinks is not valid: it must be float32"),
        ("alibi_slopes", lambda x: torch.zeros(1, 1), "alibi_slopes must have an element for each"),
    ],
)
def test_attention_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, adapter: ModuleType
) -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    tensors |= {"attn_mask": torch.randn(2, 1, 9, 9)}
    tensors |= dict.fromkeys(("alibi_slopes", "seed", "sinks"))
    options = AttentionBackwardOptions(scale=0.4)
    adapter.scaled_dot_product_attention(**tensors, options=options)
    tensors[name] = wrong(tensors[name])
    if name == "query" and tensors[name].dtype == torch.float64:
        tensors = {n: x.double() if isinstance(x, Tensor) else x for n, x in tensors.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        adapter.scaled_dot_product_attention(**tensors, options=options)
