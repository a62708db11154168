"""A race gives other bits in some of many runs: every operator, on each backend of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_device import DEVICE, skip_without_gpu
from torch import Tensor

import fastattn
from fastattn import dispatch

skip_without_gpu()
pytestmark = pytest.mark.gpu

RUNS = 1000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Call = Callable[..., Tensor | tuple[Tensor, ...]]
Draw = Callable[..., Tensor]  # of a shape; a leaf unless grad=False


def _grouped(draw: Draw) -> list[Tensor]:
    """Query, key and value with more tiles of 128 rows than a GPU has multiprocessors, for queries
    and for keys: some blocks of threads take several."""
    return [draw(4, 16, 1100, 128), *(draw(4, 4, 1100, 128) for _ in range(2))]


def _causal(draw: Draw) -> tuple[Call, list[Tensor]]:
    def call(*tensors: Tensor) -> Tensor:
        return fastattn.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    return call, _grouped(draw)


def _masked(draw: Draw) -> tuple[Call, list[Tensor]]:
    """A bias with a gradient, that excludes pairs, and dropout."""
    bias = draw(4, 16, 1100, 1100)
    with torch.no_grad():
        bias.masked_fill_(bias > 1, -torch.inf)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        same = torch.Generator(DEVICE).manual_seed(0)
        return fastattn.scaled_dot_product_attention(
            query, key, value, bias, dropout_p=0.1, enable_gqa=True, generator=same
        )

    return call, [*_grouped(draw), bias]


def _packed(draw: Draw) -> tuple[Call, list[Tensor]]:
    rows = 300, 301, 301, 1301, 2301, 3301, 4301, 5001
    ends = torch.tensor([0, *rows], device=DEVICE)

    def call(*tensors: Tensor) -> Tensor:
        return fastattn.varlen_attention(*tensors, ends, ends, is_causal=True)

    return call, [draw(5001, 16, 128), *(draw(5001, 4, 128) for _ in range(2))]


def _decoding(draw: Draw) -> tuple[Call, list[Tensor]]:
    lengths = torch.tensor([900, 40], device=DEVICE)
    table = torch.randperm(32, device=DEVICE).view(2, 16).int()

    def call(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return fastattn.decode_attention(query, keys, values, lengths, block_table=table)

    tensors = [draw(2, 8, 1, 128, grad=False)]
    return call, [*tensors, *(draw(32, 2, 64, 128, grad=False) for _ in range(2))]


def _appending(draw: Draw) -> tuple[Call, list[Tensor]]:
    """Two sequences get new rows, in pages, and then read all of theirs."""
    lengths = torch.tensor([700, 40], device=DEVICE)
    table = torch.randperm(32, device=DEVICE).view(2, 16).int()

    def call(
        query: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        caches = keys.clone(), values.clone()
        out = fastattn.decode_attention(
            query, *caches, lengths, key=key, value=value, block_table=table
        )
        return out, *caches

    caches = [draw(32, 2, 64, 128, grad=False) for _ in range(2)]
    new = [draw(2, 2, 200, 128, grad=False) for _ in range(2)]
    return call, [draw(2, 8, 1, 128, grad=False), *caches, *new]


def _merging(draw: Draw) -> tuple[Call, list[Tensor]]:
    def state() -> list[Tensor]:
        return [draw(1, 8, 2000, 128), draw(1, 8, 2000).detach().float().requires_grad_()]

    return fastattn.merge_states, [*state(), *state()]


def _sinusoidal(layout: str) -> Callable[[Draw], tuple[Call, list[Tensor]]]:
    def made(draw: Draw) -> tuple[Call, list[Tensor]]:
        return (
            lambda x: fastattn.sinusoidal_encoding(x, layout=layout, scale=32.0),
            [draw(32, 2048, 1024)],
        )

    return made


def _additive(b: int, q: int, k: int, a: int) -> Callable[[Draw], tuple[Call, list[Tensor]]]:
    def made(draw: Draw) -> tuple[Call, list[Tensor]]:
        return fastattn.additive_attention, [draw(b, q, a), draw(b, k, a), draw(b, k, a), draw(a)]

    return made


def _hops(b: int, n: int, d: int) -> Callable[[Draw], tuple[Call, list[Tensor]]]:
    def made(draw: Draw) -> tuple[Call, list[Tensor]]:
        return (
            lambda u, m: fastattn.memory_hop_attention(u, m, hops=3),
            [draw(b, d), draw(b, 4, n, d, scale=0.1)],
        )

    return made


def _encoding(
    b: int, n: int, j: int, v: int, d: int
) -> Callable[[Draw], tuple[Call, list[Tensor]]]:
    def made(draw: Draw) -> tuple[Call, list[Tensor]]:
        tokens = torch.randint(1, v, (b, n, j), device=DEVICE)
        return lambda weight: fastattn.encode_memory(tokens, weight), [draw(v, d)]

    return made


def _hopfield(
    b: int, h: int, q: int, n: int, d: int
) -> Callable[[Draw], tuple[Call, list[Tensor]]]:
    def made(draw: Draw) -> tuple[Call, list[Tensor]]:
        return (
            lambda xi, stored: fastattn.hopfield_retrieve(xi, stored, beta=0.2, update_steps_max=3),
            [draw(b, h, q, d), draw(b, h, n, d)],
        )

    return made


CALLS: dict[str, Callable[[Draw], tuple[Call, list[Tensor]]]] = {
    "attention-causal": _causal,
    "attention-masked": _masked,
    "packed": _packed,
    "decoding": _decoding,
    "appending": _appending,
    "merging": _merging,
    "sinusoidal-interleaved": _sinusoidal("interleaved"),
    "sinusoidal-marian": _sinusoidal("marian"),
    "additive": _additive(8, 256, 256, 256),
    "additive-wide": _additive(64, 30, 30, 512),
    "additive-step": _additive(64, 1, 50, 512),
    "hops": _hops(32, 50, 20),
    "hops-many": _hops(1024, 50, 20),
    "hops-wide": _hops(64, 320, 128),
    "hops-long": _hops(4, 100_000, 64),
    "encoding": _encoding(32, 50, 11, 200, 20),
    "encoding-large": _encoding(1024, 50, 11, 20_000, 64),
    "hopfield": _hopfield(8, 8, 32, 256, 64),
    "hopfield-long": _hopfield(1, 1, 64, 10_000, 64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_race_would_show_in_some_of_many_runs(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    if isinstance(reason := dispatch.load(backend), str):
        pytest.skip(f"{backend}: {reason}")
    drawn = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        x = torch.randn(shape, generator=drawn, device=DEVICE) * scale
        return x.to(dtype).requires_grad_(grad)

    call, leaves = CALLS[name](draw)

    def results() -> list[Any]:
        found = call(*leaves)
        outs = found if isinstance(found, tuple) else (found,)
        if not outs[0].requires_grad:
            return [*outs]
        grads = torch.autograd.grad(outs, leaves, [*map(torch.ones_like, outs)])
        return [*(out.detach() for out in outs), *grads]

    with fastattn.use_backend(backend):
        first = results()
        for n in range(RUNS):
            for one, other in zip(first, results(), strict=True):
                assert torch.equal(one, other), f"run {n + 1} differs from the first"
