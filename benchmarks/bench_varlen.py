"""`varlen_attention` beside the same work padded, and sequence by sequence.

    python benchmarks/bench_varlen.py [--threads N] [--rounds N] [--dtype float32]

prints one interleaved run: medians, and the medians of the ratios within rounds. The peers are
PyTorch's attention of a padded batch with a mask, PyTorch's attention in a loop over the sequences,
and our own attention of the padded batch. With pytest-benchmark, `bench_varlen` times each alone.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.spelling import one_dtype

# Lengths, heads, key heads, width.
SIZES: dict[str, tuple[list[int], int, int, int]] = {
    "documents": ([1024, 64, 300, 128, 700, 96, 512, 200], 12, 12, 64),
    "uneven": ([3000, 50, 40, 30, 20, 10], 8, 8, 64),
    "short": ([random.Random(0).randint(8, 96) for _ in range(64)], 12, 12, 64),
    "grouped": ([512, 900, 130, 257], 32, 8, 128),
}
PROVIDERS = ("fastattn", "torch padded", "torch loop", "fastattn padded")


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    lengths, heads, kv_heads, width = SIZES[name]
    draw = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), n, width) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]


def attend(provider: str, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = SIZES[name][0]
    if provider == "fastattn":
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return fastattn.varlen_attention(q, k, v, ends, ends, is_causal=True)
    if provider == "torch loop":
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in one), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(parts)
    padded = [
        torch.nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True).transpose(1, 2)
        for x in (q, k, v)
    ]
    # Padding is at the end, where a causal mask hides it from every row that counts.
    function = (
        fastattn.scaled_dot_product_attention
        if provider == "fastattn padded"
        else torch.nn.functional.scaled_dot_product_attention
    )
    out = function(*padded, is_causal=True, enable_gqa=True).transpose(1, 2)
    return torch.cat([out[b, :n] for b, n in enumerate(lengths)])


def call(provider: str, name: str, args: list[Tensor], backward: bool) -> tuple[Tensor, ...]:
    if not backward:
        with torch.no_grad():
            return (attend(provider, name, *args),)
    out = attend(provider, name, *args)
    return (out.detach(), *torch.autograd.grad(out, args, torch.ones_like(out)))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", SIZES)
def bench_varlen(benchmark: Any, name: str, backward: bool, provider: str) -> None:
    args = operands(name, torch.float32)
    benchmark.group = f"{name} {'fwd+bwd' if backward else 'fwd'}"
    benchmark(call, provider, name, args, backward)


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in every round, in an order of its own."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        calls[name]()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            begin = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def report(label: str, times: dict[str, list[float]]) -> None:
    """The medians, and how many times as long as ours each peer took, in the median round."""
    ours, *peers = times
    parts = [f"{label:24} {ours} {statistics.median(times[ours]) * 1e3:8.2f} ms"]
    for peer in peers:
        ratio = statistics.median(b / a for a, b in zip(times[ours], times[peer], strict=True))
        parts.append(f"{peer} {ratio:.2f}x")
    print(" | ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--dtype", default="float32", type=one_dtype(["float32", "bfloat16", "float16"])
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    for name in SIZES:
        args = operands(name, dtype)
        for backward in (False, True):
            calls = {p: functools.partial(call, p, name, args, backward) for p in PROVIDERS}
            want = calls["fastattn"]()
            for p in PROVIDERS:
                tolerance = 1e-3 if dtype == torch.float32 else 0.2
                for a, b in zip(calls[p](), want, strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            label = f"{name} {'fwd+bwd' if backward else 'fwd'}"
            report(label, interleaved(calls, options.rounds))


if __name__ == "__main__":
    main()
