"""The native module around its kernels: which tensors it accepts, and on which device and stream
everything runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import PROOFS
from emulated import Emulated
from torch import Tensor

from fastattn import compat, library
from fastattn.backends.primitives import AttentionBackwardOptions

# Operators with kernels: the windows of Luong's attention have none.
OPERATORS = [name for name in PROOFS if name != "luong_attention"]
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def call(adapter: ModuleType, operator: str) -> dict[str, Tensor]:
    """The results of an operator and its gradients, in one of its cases."""
    cases, target = PROOFS[operator].cases, Emulated(adapter)
    names = ("results-1-out-lse-weights-mask", "plain")
    case = next((x for x in cases if x.name in names), cases[0])
    with target.active() as backend:
        return target.results(backend, PROOFS[operator].make(case, torch.float32))


def runs_at(adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, device: int, stream: int) -> None:
    """The calls of the adapter are on this device and stream."""

    @contextlib.contextmanager
    def current(of: torch.device) -> Iterator[tuple[int, int]]:
        assert of == torch.device("cpu")  # the emulator's
        yield device, stream

    monkeypatch.setattr(adapter.operands, "current_device", current)


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


@each_operator
def test_every_kernel_is_launched_on_the_stream_of_the_call(
    operator: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter._cuda.take_launches()
    adapter._cuda.take_streams()
    runs_at(adapter, monkeypatch, device=0, stream=0x5EED)
    call(adapter, operator)
    assert adapter._cuda.take_streams() == {0x5EED}
    assert len(adapter._cuda.take_launches()) >= 1


@each_operator
def test_tensors_of_another_device_are_refused(
    operator: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_at(adapter, monkeypatch, device=1, stream=0)
    adapter._cuda.take_launches()
    with pytest.raises(TypeError, match="must be a tensor in the memory of GPU 1, of at most 5"):
        call(adapter, operator)
    assert not adapter._cuda.take_launches()
    monkeypatch.undo()
    call(adapter, operator)  # the next call is on its own device again


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
    launch = adapter.operands.launch_on_stream(kernel)
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


@each_operator
def test_tensors_are_read_in_either_way(operator: str, way: None, adapter: ModuleType) -> None:
    got = call(adapter, operator)
    adapter._cuda.use_torch(torch, compat.exchange_interface, "cpu")
    torch.testing.assert_close(got, call(adapter, operator), rtol=0, atol=0)


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
