"""`attention_stats` beside the whole matrix of weights in plain PyTorch.

    python benchmarks/bench_attention_stats.py [--threads N] [--rounds N]

prints one interleaved run: medians, the median of the ratios within rounds, and by how much each
peaked above its inputs. With pytest-benchmark, `bench_attention_stats` times each alone.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.bench.memory import peak_extra_bytes

# B, H, Lq, Lk, D
SIZES = {"prompt": (1, 8, 2048, 2048, 64), "last": (1, 32, 64, 8192, 128)}
TOP_K = 8


def ours(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    stats = fastattn.attention_stats(query, key, top_k=TOP_K)
    return stats.column_sums, stats.entropy, stats.top_values


def plain(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    w = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return w.sum(2), torch.special.entr(w).sum(-1), w.topk(TOP_K, -1).values


PROVIDERS = {"fastattn": ours, "torch": plain}


def operands(name: str) -> tuple[Tensor, Tensor]:
    b, h, queries, keys, width = SIZES[name]
    draw = torch.Generator().manual_seed(0)
    shapes = (b, h, queries, width), (b, h, keys, width)
    query, key = (torch.randn(shape, generator=draw) for shape in shapes)
    return query, key


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", SIZES)
def bench_attention_stats(benchmark: Any, name: str, provider: str) -> None:
    benchmark.group = name
    benchmark(PROVIDERS[provider], *operands(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in SIZES:
        args = operands(name)
        calls = {p: functools.partial(call, *args) for p, call in PROVIDERS.items()}
        for a, b in zip(*(call() for call in calls.values()), strict=True):
            torch.testing.assert_close(a, b)
        peaks = {p: peak_extra_bytes(call)[1] for p, call in calls.items()}
        times: dict[str, list[float]] = {p: [] for p in calls}
        for _ in range(options.rounds):
            for p in random.sample(list(calls), len(calls)):
                begin = time.perf_counter()
                calls[p]()
                times[p].append(time.perf_counter() - begin)
        ratio = statistics.median(
            b / a for a, b in zip(times["fastattn"], times["torch"], strict=True)
        )
        parts = [
            f"{p} {statistics.median(times[p]) * 1e3:.1f} ms"
            + ("" if peaks[p] is None else f", {(peaks[p] or 0) / 1e6:.0f} MB more")
            for p in calls
        ]
        print(f"{name:8} {' | '.join(parts)} | torch {ratio:.2f}x")


if __name__ == "__main__":
    main()
