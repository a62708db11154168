"""Local attention (`luong_attention`, local-p) against the same equation on whole matrices.

    python benchmarks/bench_luong.py [--threads N] [--rounds N]

prints one interleaved run in float32, forward, and forward with backward: medians, and the ratio of
plain PyTorch's time to ours beside Tk / (2 D + 1), the part of the scores that a window has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fastattn import luong_attention

SHAPES = (  # B, Tq, Tk, width, D
    (64, 1, 200, 256, 10),
    (64, 1, 1000, 256, 10),
    (64, 50, 50, 512, 10),
    (16, 50, 1000, 256, 10),
    (4, 1000, 1000, 64, 10),
)


def plain(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, half: int) -> Tensor:
    distance = torch.arange(key.shape[1]) - positions[..., None]
    scores = (query @ key.mT).masked_fill(distance.abs() > half, float("-inf"))
    weights = scores.softmax(-1) * torch.exp(-2 * (distance / half) ** 2)
    return weights @ value


def calls(shape: tuple[int, ...], backward: bool) -> list[Callable[[], object]]:
    batch, queries, keys, width, half = shape
    q, k, v = (torch.randn(batch, n, width, requires_grad=backward) for n in (queries, keys, keys))
    positions = torch.rand(batch, queries) * (keys - 1)
    grad = torch.randn(batch, queries, width)

    def ours() -> Tensor:
        out: Tensor = luong_attention(q, k, v, window="local-p", positions=positions, D=half)
        return out

    def theirs() -> Tensor:
        return plain(q, k, v, positions, half)

    torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-3)
    if not backward:
        return [ours, theirs]
    return [lambda f=f: torch.autograd.grad(f(), (q, k, v), grad) for f in (ours, theirs)]  # type: ignore[misc]


def medians(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for kept, function in zip(times, functions, strict=True):
            begin = time.perf_counter()
            function()
            kept.append(time.perf_counter() - begin)
    return [1e3 * statistics.median(kept[1:]) for kept in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("   B   Tq   Tk   E   D  Tk/(2D+1)   forward ms: ours, plain      forward + backward")
    for shape in SHAPES:
        line = "{:4}{:5}{:5}{:4}{:4}".format(*shape) + f"{shape[2] / (2 * shape[4] + 1):10.1f}"
        for backward in (False, True):
            ours, theirs = medians(calls(shape, backward), options.rounds)
            line += f"   {ours:8.2f} {theirs:8.2f} {theirs / ours:6.1f}x"
        print(line, flush=True)


if __name__ == "__main__":
    main()
