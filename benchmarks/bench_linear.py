"""Which GEMM is fastest for the projections of attention: the table behind fastattn/nn/_linear.py.

    python benchmarks/bench_linear.py [--dtype bfloat16] [--threads 2] [--seconds 1]

The candidates of one product run in turn, so that they share whatever else the machine does; a
column is the median over these rounds of the first candidate's time divided by its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends import cpu
from fastattn.nn._linear import linear
from fastattn.spelling import one_dtype

ROWS = (16, 64, 256, 1024, 4096, 8192)
WIDTHS = ((256, 768), (512, 1536), (768, 2304), (768, 768), (1024, 1024))  # K, N

Candidates = dict[str, Callable[[], Tensor]]


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def products(m: int, k: int, n: int, dtype: torch.dtype) -> dict[str, Candidates]:
    x, dy = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    if dtype == torch.float16:  # PyTorch has no fast one to compare
        return {
            "y": {
                "F.linear": lambda: F.linear(x, weight, bias),
                "in float32": lambda: linear(x.float(), weight.float(), bias.float()).half(),
                "ours": lambda: cpu.linear(x, weight, bias),
            }
        }
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
    table: dict[str, Candidates] = {
        "y": {
            "F.linear": lambda: F.linear(x, weight, bias),
            "oneDNN": lambda: onednn(x, weight, bias),
            "oneDNN, packed": lambda: onednn(x, packed, bias),
        },
        "dx": {"torch.mm": lambda: dy @ weight, "oneDNN": lambda: onednn(dy, weight.t())},
        "dW": {
            "torch.mm": lambda: dy.t() @ x,
            "torch.mm, transposed": lambda: (x.t() @ dy).t(),
            "oneDNN": lambda: onednn(dy.t(), x.t()),
            "oneDNN, transposed": lambda: onednn(x.t(), dy.t()).t(),
        },
    }
    table["y"]["ours"] = lambda: cpu.linear(x, weight, bias)
    table["dx"]["ours"] = lambda: cpu.linear(dy, weight.t(), None)
    return table


def race(candidates: Candidates, seconds: float) -> tuple[float, dict[str, float]]:
    """The first candidate's best time in seconds, and the speed of each relative to it."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or (time.perf_counter() < end and rounds < 500):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    first = next(iter(times.values()))
    speed = {
        name: statistics.median(a / b for a, b in zip(first, own, strict=True))
        for name, own in times.items()
    }
    return min(first), speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", default="float32", type=one_dtype(["float32", "bfloat16", "float16"])
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each product")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {options.dtype}, {options.threads} threads")
    for m in ROWS:
        for k, n in WIDTHS:
            for name, candidates in products(m, k, n, dtype).items():
                best, speed = race(candidates, options.seconds)
                base, *others = speed
                relative = "  ".join(f"{other} {speed[other]:.2f}x" for other in others)
                rate = 2 * m * k * n / best * 1e-9
                print(f"M={m:<5}K={k:<5}N={n:<5}{name:<3} {base} {rate:.0f} GFLOP/s  {relative}")


if __name__ == "__main__":
    main()
