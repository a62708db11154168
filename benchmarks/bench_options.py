"""What an option of `scaled_dot_product_attention` costs: its time over that of the plain call.

    python benchmarks/bench_options.py [--threads N] [--rounds N] [--length L]

prints one interleaved run; each round times the plain call and every option once, and the ratio is
the median over the rounds. A window and a causal mask leave pairs out: their ratio is that of the
times per visible pair. `both` is forward and backward. With pytest-benchmark, `bench_options` times
each alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn

BATCH, HEADS, WIDTH = 2, 12, 64
DTYPES = (torch.float32, torch.bfloat16)
OPTIONS = (
    "plain",
    "causal",
    "window",
    "softcap",
    "alibi",
    "bias",
    "learnable bias",
    "dropout",
    "weights",
    "averaged weights",
)


class Call:
    """One call, its operands, and how many pairs of it are computed."""

    def __init__(self, option: str, dtype: torch.dtype, length: int, backward: bool) -> None:
        shape = (BATCH, HEADS, length, WIDTH)
        self.backward = backward
        self.args = [torch.randn(shape, dtype=dtype, requires_grad=backward) for _ in range(3)]
        self.grad = torch.randn(shape, dtype=dtype)
        self.wanted = list(self.args)
        self.pairs = length * length
        self.options: dict[str, Any] = {
            "softcap": {"softcap": 30.0},
            "alibi": {"alibi_slopes": torch.linspace(0.1, 1, HEADS)},
            "dropout": {"dropout_p": 0.1},
            "weights": {"need_weights": True},
            "averaged weights": {"need_weights": True, "average_weights": True},
        }.get(option, {})
        if option == "causal":
            self.options = {"is_causal": True}
            self.pairs = length * (length + 1) // 2
        elif option == "window":
            left = length // 4
            self.options = {"is_causal": True, "window": (left, 0)}
            self.pairs = sum(min(i, left) + 1 for i in range(length))
        elif option.endswith("bias"):
            learnable = backward and option == "learnable bias"
            bias = torch.randn(1, HEADS, length, length, dtype=dtype, requires_grad=learnable)
            self.options = {"attn_mask": bias}
            self.wanted += [bias] if learnable else []

    def __call__(self) -> None:
        out = fastattn.scaled_dot_product_attention(*self.args, **self.options)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        if self.backward:
            torch.autograd.grad(result, self.wanted, self.grad)

    def seconds_per_pair(self) -> float:
        begin = time.perf_counter()
        self()
        return (time.perf_counter() - begin) / self.pairs


def skipped(option: str, backward: bool) -> bool:
    return option == "learnable bias" and not backward


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def bench_options(benchmark: Any, option: str, dtype: torch.dtype, backward: bool) -> None:
    if skipped(option, backward):
        pytest.skip("the forward pass of a bias does not depend on who learns it")
    benchmark.group = f"{dtype} {'both' if backward else 'forward'}"
    benchmark(Call(option, dtype, 512, backward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'':18}" + "".join(f"{t:>24}" for t in ("fp32 forward, both", "bf16 forward, both")))
    ratios = {
        (dtype, backward): compare(dtype, backward, options.length, options.rounds)
        for dtype in DTYPES
        for backward in (False, True)
    }
    for option in OPTIONS:
        cells = (found.get(option) for found in ratios.values())
        print(f"{option:18}" + "".join(f"{'' if x is None else f'{x:.2f}x':>12}" for x in cells))


def compare(dtype: torch.dtype, backward: bool, length: int, rounds: int) -> dict[str, float]:
    calls: dict[str, Callable[[], float]] = {}
    for option in OPTIONS:
        if not skipped(option, backward):
            call = Call(option, dtype, length, backward)
            call()
            calls[option] = call.seconds_per_pair
    found: dict[str, list[float]] = {option: [] for option in calls}
    for _ in range(rounds):
        times = {option: timed() for option, timed in calls.items()}
        for option, seconds in times.items():
            found[option].append(seconds / times["plain"])
    return {option: statistics.median(x) for option, x in found.items()}


if __name__ == "__main__":
    main()
