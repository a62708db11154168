"""How calls run on a GPU: streams, graphs, compiled code, races; on each GPU backend.

`python -m pytest tests/gpu`. Skipped as a whole where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_device import DEVICE, skip_without_gpu

import fastattn
from fastattn import dispatch

skip_without_gpu()
pytestmark = pytest.mark.gpu

BUILT = [name for name in ("cuda", "triton") if not isinstance(dispatch.load(name), str)]


@pytest.fixture(autouse=True, params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn, forced."""
    if request.param not in BUILT:
        pytest.skip(f"{request.param}: {dispatch.load(request.param)}")
    with fastattn.use_backend(request.param):
        yield request.param


def _tensors(*shape: int, count: int = 3, device: str = DEVICE) -> list[torch.Tensor]:
    """Random tensors in bfloat16."""
    draw = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
        for _ in range(count)
    ]


def _calls() -> dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """Name -> function of the tensors that change, and these."""
    ends = torch.tensor([0, 100, 100, 300], device=DEVICE)
    lengths = torch.tensor([700, 13], device=DEVICE)
    table = torch.randperm(22, device=DEVICE).view(2, 11).int()

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
def test_a_cuda_graph_replays_a_call_on_new_values(name: str) -> None:
    run, tensors = _calls()[name]
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
    with torch.cuda.device(0):
        out = fastattn.scaled_dot_product_attention(*tensors)
    assert out.device == tensors[0].device
    want = torch.nn.functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_more_than_two_to_the_31_elements() -> None:
    heads, length = 132, 2**17  # of 128 columns: 2.2e9 elements
    query = torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"window": (64, 0)}
    out = fastattn.scaled_dot_product_attention(query, query, query, **options)
    last = query[:, -1:].clone()
    want = fastattn.scaled_dot_product_attention(last, last, last, **options)
    assert torch.equal(out[:, -1:], want)


def test_multihead_attention_has_the_contract_of_torch() -> None:
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=DEVICE)
    ours = fastattn.MultiheadAttention(64, 4, batch_first=True, device=DEVICE)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 50, 64, device=DEVICE)
    padding = torch.arange(50, device=DEVICE).expand(2, 50) >= torch.tensor([[50], [31]]).to(DEVICE)
    want, want_weights = stock(x, x, x, key_padding_mask=padding)
    got, weights = ours(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-5)


def test_the_first_available_backend_is_chosen(backend: str) -> None:
    query = torch.randn(1, 1, 8, 16, device=DEVICE)
    token = dispatch.forced.set("")
    explanation = fastattn.explain("scaled_dot_product_attention", query, query, query)
    dispatch.forced.reset(token)
    assert explanation.runs == BUILT[0], explanation
    assert not explanation.reasons[backend]
