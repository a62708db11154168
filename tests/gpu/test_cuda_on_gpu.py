"""The CUDA kernels on a GPU: `python -m pytest tests/gpu`. Skipped as a whole where there is none.

The inputs are those of the emulator's tests, copied to the GPU before each call; so is the bound.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastattn
from fastattn.testing import CASES, Case, check
from fastattn.testing.additive import ADDITIVE_CASES, AdditiveCase, check_additive
from fastattn.testing.decode import DECODE_CASES, DecodeCase, check_decode
from fastattn.testing.sinusoidal import SINUSOIDAL_CASES, SinusoidalCase, check_sinusoidal
from fastattn.testing.varlen import VARLEN_CASES, VarlenCase, check_varlen

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU here", allow_module_level=True)
cuda = pytest.importorskip("fastattn.backends.cuda", reason="the CUDA kernels are not built")
pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def _moved(x: Any, device: str) -> Any:
    """x on another device, with its strides, stride 0 included."""
    if isinstance(x, tuple):
        return tuple(_moved(item, device) for item in x)
    if not isinstance(x, torch.Tensor):
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((size,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: Any, **options: Any) -> Any:
        return _moved(function(*_moved(tensors, "cuda"), **options), "cpu")

    return call


@dataclass(frozen=True)
class OnGpu:
    """A target of the judges: CPU tensors in and out, the CUDA kernels between."""

    backend: str = "cuda"

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        functions = {name: _on_gpu(getattr(cuda, name)) for name in cuda.__all__}
        functions["why_not"] = lambda op, *tensors, **options: cuda.why_not(
            op, *_moved(tensors, "cuda"), **options
        )
        yield SimpleNamespace(**functions)


def _judge(judge: Callable[..., Any], case: Any, dtype: torch.dtype) -> None:
    verdict = judge(case, dtype, OnGpu())
    if verdict.declined:
        pytest.skip("; ".join(verdict.declined))
    assert verdict.ok, "\n".join(verdict.faults)


@dtypes
@pytest.mark.parametrize("case", CASES["scaled_dot_product_attention"], ids=lambda case: case.name)
def test_attention(case: Case, dtype: torch.dtype) -> None:
    _judge(check, case, dtype)


@dtypes
@pytest.mark.parametrize("case", VARLEN_CASES, ids=lambda case: case.name)
def test_packed_sequences(case: VarlenCase, dtype: torch.dtype) -> None:
    _judge(check_varlen, case, dtype)


@dtypes
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decoding(case: DecodeCase, dtype: torch.dtype) -> None:
    _judge(check_decode, case, dtype)


@dtypes
@pytest.mark.parametrize("case", ADDITIVE_CASES, ids=lambda case: case.name)
def test_additive_attention(case: AdditiveCase, dtype: torch.dtype) -> None:
    _judge(check_additive, case, dtype)


@dtypes
@pytest.mark.parametrize("case", SINUSOIDAL_CASES, ids=lambda case: case.name)
def test_sinusoidal_encoding(case: SinusoidalCase, dtype: torch.dtype) -> None:
    _judge(check_sinusoidal, case, dtype)


# -- how a call runs ------------------------------------------------------------------------------


def _tensors(*shape: int, count: int = 3, device: str = "cuda") -> list[torch.Tensor]:
    draw = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
        for _ in range(count)
    ]


def _calls() -> dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """Name -> function of the tensors that change, and these."""
    ends = torch.tensor([0, 100, 100, 300], device="cuda")
    lengths = torch.tensor([700, 13], device="cuda")
    table = torch.randperm(22, device="cuda").view(2, 11).int()

    def decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return fastattn.decode_attention(query, keys, values, lengths, block_table=table)

    def packed(*tensors: torch.Tensor) -> torch.Tensor:
        return fastattn.varlen_attention(*tensors, ends, ends, is_causal=True)

    def dense(*tensors: torch.Tensor) -> torch.Tensor:
        return fastattn.scaled_dot_product_attention(*tensors, is_causal=True)

    return {
        "dense": (dense, _tensors(2, 4, 300, 64)),
        "packed": (packed, _tensors(300, 4, 64)),
        "decode": (decode, [*_tensors(2, 8, 1, 64, count=1), *_tensors(22, 2, 64, 64, count=2)]),
    }


calls = pytest.mark.parametrize("name", ["dense", "packed", "decode"])


@calls
def test_a_call_runs_on_the_current_stream(name: str) -> None:
    run, tensors = _calls()[name]
    with fastattn.use_backend("cuda"):
        want = run(*tensors)
        late = [torch.zeros_like(x) for x in tensors]
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # a kernel on another stream would read zeros
            for x, y in zip(late, tensors, strict=True):
                x.copy_(y)
            out = run(*late)
        stream.synchronize()
    assert torch.equal(out, want)


@calls
def test_a_graph_replays_a_call_on_new_numbers(name: str) -> None:
    run, tensors = _calls()[name]
    with fastattn.use_backend("cuda"):
        run(*tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*tensors)
        for x in tensors:
            x.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(*tensors))


@calls
def test_compiled_code_has_no_break_and_the_same_bits(name: str) -> None:
    run, tensors = _calls()[name]
    want = run(*tensors)
    assert torch.equal(torch.compile(run, fullgraph=True)(*tensors), want)


def test_gradients_within_a_graph() -> None:
    run, tensors = _calls()["dense"]
    leaves = [x.requires_grad_() for x in tensors]

    def step() -> list[torch.Tensor]:
        out = run(*leaves)
        return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    with fastattn.use_backend("cuda"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    tensors = _tensors(1, 2, 100, 64, device="cuda:1")
    with torch.cuda.device(0), fastattn.use_backend("cuda"):
        out = fastattn.scaled_dot_product_attention(*tensors)
    assert out.device == tensors[0].device
    want = torch.nn.functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_more_than_two_to_the_31_elements() -> None:
    heads, length = 132, 2**17  # of 128 columns: 2.2e9 elements
    query = torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"window": (64, 0)}
    with fastattn.use_backend("cuda"):
        out = fastattn.scaled_dot_product_attention(query, query, query, **options)
        last = query[:, -1:].clone()
        want = fastattn.scaled_dot_product_attention(last, last, last, **options)
    assert torch.equal(out[:, -1:], want)


@calls
def test_a_race_would_show_in_some_of_many_runs(name: str) -> None:
    run, tensors = _calls()[name]
    with fastattn.use_backend("cuda"):
        first = run(*tensors)
        for _ in range(50):
            assert torch.equal(run(*tensors), first)


def test_the_cuda_kernels_come_first() -> None:
    query = torch.randn(1, 1, 8, 16, device="cuda")
    explanation = fastattn.explain("scaled_dot_product_attention", query, query, query)
    assert explanation.runs == "cuda", explanation
    assert importlib.import_module("fastattn._cuda").build_info()["device"] == "cuda"
