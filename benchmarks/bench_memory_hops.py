"""`memory_hop_attention` against the same equations in plain PyTorch, forward and backward.

    python benchmarks/bench_memory_hops.py [--threads 2] [--dtype float32] [--forward]

The candidates run in turn, so that they share whatever else the machine does; a ratio is the median
over these rounds. GFLOP/s counts 4 K N D a query forward and 10 more backward, which computes the
scores again; it stands beside the multiply-add peak measured in the same run. GB/s is what reading
the memories once comes to, and with gradients reading them once more and writing as much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn import _cpu, memory_hop_attention
from fastattn.spelling import one_dtype


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    rows: int
    width: int
    hops: int
    shared: bool = False


ROWS = (
    Row("bAbI: 50 sentences a question", 32, 50, 20, 3),
    Row("one memory for all queries", 256, 10_000, 128, 3, shared=True),
    Row("a memory a query", 256, 1000, 128, 3),
    Row("one query, a million rows", 1, 1_000_000, 64, 3),
)


def plain(query: Tensor, in_memory: Tensor, out_memory: Tensor, hops: int) -> Tensor:
    """The equations, on [B, D] and [B, N, D]; [1, N, D] as a product of matrices."""
    u = query
    for _ in range(hops):
        if in_memory.shape[0] == 1:
            u = u + torch.softmax(u @ in_memory[0].T, -1) @ out_memory[0]
        else:
            p = torch.softmax(torch.bmm(in_memory, u.unsqueeze(2)).squeeze(2), -1)
            u = u + torch.bmm(p.unsqueeze(1), out_memory).squeeze(1)
    return u


def ours(query: Tensor, in_memory: Tensor, out_memory: Tensor, hops: int) -> Tensor:
    return memory_hop_attention(query, in_memory, out_memory, hops=hops)  # type: ignore[no-any-return]


def timed(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(row: Row, dtype: torch.dtype, backward: bool, seconds: float, threads: int) -> str:
    memories = 1 if row.shared else row.batch
    query = torch.randn(row.batch, row.width).to(dtype).requires_grad_(backward)
    m = (0.1 * torch.randn(memories, row.rows, row.width)).to(dtype).requires_grad_(backward)
    c = (0.1 * torch.randn(memories, row.rows, row.width)).to(dtype).requires_grad_(backward)
    grad = torch.randn(row.batch, row.width).to(dtype)
    leaves = (query, m, c)

    def call(function: Callable[..., Tensor]) -> Callable[[], object]:
        if not backward:
            return lambda: function(*leaves, row.hops)
        return lambda: torch.autograd.grad(function(*leaves, row.hops), leaves, grad)

    candidates = call(plain), call(ours)
    for run in candidates:
        run()
    once = timed(candidates[0], 1)
    repeats = max(1, int(0.01 / once))
    times: tuple[list[float], list[float]] = ([], [])
    peaks = []
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for own, run in zip(times, candidates, strict=True):
            own.append(timed(run, repeats))
        peaks.append(_cpu.measure_peak("fma_f32", threads, 0.02))
    speed = statistics.median(a / b for a, b in zip(*times, strict=True))
    best = statistics.median(times[1])
    work = (14 if backward else 4) * row.batch * row.hops * row.rows * row.width
    peak = statistics.median(peaks)
    moved = (3 if backward else 1) * 2 * memories * row.rows * row.width * dtype.itemsize
    return (
        f"{row.name:<32} B={row.batch:<4} N={row.rows:<8} D={row.width:<4} K={row.hops}  "
        f"plain {statistics.median(times[0]) * 1e3:8.3f} ms  ours {best * 1e3:8.3f} ms  "
        f"{speed:5.2f}x  {work / best * 1e-9:5.0f} GFLOP/s ({work / best * 1e-7 / peak:3.0f} % of "
        f"{peak:.0f})  {moved / best * 1e-9:5.1f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--dtype", default="float32", type=one_dtype(["float32", "bfloat16", "float16"])
    )
    parser.add_argument("--rows", type=int, nargs="*", default=range(3), help="which of the rows")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    what = "forward" if options.forward else "forward and backward"
    bandwidth = _cpu.measure_peak("read_bandwidth", options.threads, 0.2)
    print(
        f"torch {torch.__version__}, {options.dtype}, {options.threads} threads, {what}; "
        f"reading comes at {bandwidth:.1f} GB/s"
    )
    for n in options.rows:
        print(measure(ROWS[n], dtype, not options.forward, options.seconds, options.threads))


if __name__ == "__main__":
    main()
