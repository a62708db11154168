"""`decode_attention`: a step of decoding, as a share of the memory's read bandwidth.

    python benchmarks/bench_decode.py [--threads N] [--rounds N]

prints one interleaved run: the bytes of keys and values that a step must read over its median time,
what a loop that only reads reached in the same rounds, and how many times as long PyTorch's
attention took on the same (contiguous, full) cache. The loop reads before and after each step; a
round in which the two differ by more than a tenth was not quiet and is not counted. With
pytest-benchmark, `bench_decode` times each alone.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn

# Batch, heads, key heads, keys, width, page (0: contiguous).
SIZES = {
    "one": (1, 32, 8, 4096, 128, 0),
    "paged": (1, 32, 8, 4096, 128, 16),
    "all heads": (1, 32, 32, 4096, 128, 0),
    "all heads paged": (1, 32, 32, 4096, 128, 16),
    "batch": (8, 32, 8, 4096, 128, 0),
    "batch paged": (8, 32, 8, 4096, 128, 64),
    "one key head": (4, 32, 1, 8192, 128, 0),
}


class Step:
    """A query a sequence, and the caches of all of them; pages lie in random order."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        b, heads, kv_heads, keys, width, page = SIZES[name]
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(dtype)

        self.query = normal(b, heads, 1, width)
        self.caches = [normal(b, kv_heads, keys, width) for _ in range(2)]
        self.table = None
        self.pages = self.caches
        if page:
            order = torch.randperm(b * keys // page, generator=draw)
            self.table = order.view(b, -1).int()
            shape = len(order), kv_heads, page, width
            self.pages = [torch.empty(shape, dtype=dtype) for _ in range(2)]
            for to, x in zip(self.pages, self.caches, strict=True):
                to[order] = x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        self.bytes = 2 * self.caches[0].numel() * self.caches[0].itemsize

    def ours(self) -> Tensor:
        return fastattn.decode_attention(self.query, *self.pages, block_table=self.table)

    def torch(self) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.query, *self.caches, enable_gqa=True
        )


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("provider", ["ours", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def bench_decode(benchmark: Any, name: str, dtype: torch.dtype, provider: str) -> None:
    benchmark.group = f"{name} {dtype}"
    benchmark(getattr(Step(name, dtype), provider))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in SIZES:
        for dtype in DTYPES:
            step = Step(name, dtype)
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(step.ours(), step.torch(), rtol=tolerance, atol=tolerance)
            compare(f"{name} {str(dtype)[6:]}", step, options.threads, options.rounds)


def compare(label: str, step: Step, threads: int, rounds: int) -> None:
    from fastattn import _cpu

    def timed(call: Any, repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats

    repeats = {"ours": 10, "torch": 1}
    calls = {name: functools.partial(timed, getattr(step, name), repeats[name]) for name in repeats}
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = []
    for _ in range(rounds):
        before = _cpu.measure_peak("read_bandwidth", threads, 0.03)
        ours = calls["ours"]()
        after = _cpu.measure_peak("read_bandwidth", threads, 0.03)
        if abs(before - after) > max(before, after) / 10:
            continue
        peaks.append((before + after) / 2)
        times["ours"].append(ours)
        times["torch"].append(calls["torch"]())
    if not peaks:
        print(f"{label:26} no quiet round")
        return
    ours = statistics.median(times["ours"])
    share = statistics.median(
        step.bytes / 1e9 / t / peak for t, peak in zip(times["ours"], peaks, strict=True)
    )
    ratio = statistics.median(b / a for a, b in zip(times["ours"], times["torch"], strict=True))
    print(
        f"{label:26} {step.bytes / 1e6:6.1f} MB {ours * 1e6:8.0f} us "
        f"{step.bytes / 1e9 / ours:6.1f} GB/s = {share:4.0%} of {statistics.median(peaks):.1f}"
        f" | torch {ratio:.1f}x | {len(peaks)} rounds"
    )


if __name__ == "__main__":
    main()
