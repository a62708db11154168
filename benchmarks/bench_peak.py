"""Forward attention as a share of the processor's peak of multiply-adds, and the memory it takes.

    FASTATTN_CPU_ISA=avx2 python benchmarks/bench_peak.py [--dtype fp32] [--threads N] [--rounds N]

Each round measures the peak, the call, and the peak again, each for as long: of fp32 the peak of
the instruction set in use, of 16 bits that of the processor's fastest unit. A round in which the
two peaks differ by more than a twentieth was not quiet and is not counted. The share is the median
over the others: FLOPs of visible pairs only, output allocation included. The last lines are by how
much forward and backward peak above their inputs at 16384 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import fastattn
from fastattn.bench.memory import peak_extra_bytes
from fastattn.bench.peaks import KIND_OF_DTYPE, measure_peak
from fastattn.spelling import one_dtype

# B, H, L, D
SHAPES = [(8, 12, 128, 64), (8, 12, 512, 64), (1, 16, 2048, 64), (1, 16, 2048, 128)]
LONG = (1, 1, 16384, 64)


SECONDS = 0.05  # of a call, repeated, and of a peak
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def operands(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def peak_of(dtype: str, threads: int) -> float:
    if dtype == "fp32":
        from fastattn import _cpu

        return float(_cpu.measure_peak("fma_f32", threads, SECONDS))
    return measure_peak(KIND_OF_DTYPE[dtype], threads, SECONDS).rate


def share(
    shape: tuple[int, int, int, int], causal: bool, dtype: str, threads: int, rounds: int
) -> str:
    batch, heads, length, width = shape
    pairs = length * (length + 1) // 2 if causal else length * length
    flops = 4 * width * batch * heads * pairs
    args = operands(shape, DTYPES[dtype])
    shares = []

    def call() -> Tensor:
        return fastattn.scaled_dot_product_attention(*args, is_causal=causal)

    call()
    begin = time.perf_counter()
    call()
    repeats = max(1, int(SECONDS / (time.perf_counter() - begin)))
    peak_of(dtype, threads)  # which unit is the fastest
    for _ in range(rounds):
        before = peak_of(dtype, threads)
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        seconds = (time.perf_counter() - begin) / repeats
        after = peak_of(dtype, threads)
        if abs(before - after) <= max(before, after) / 20:
            shares.append(flops / 1e9 / seconds / ((before + after) / 2))
    counted = f"{len(shares)} of {rounds} rounds counted"
    return f"{statistics.median(shares):.0%}, {counted}" if shares else counted


def extra_memory() -> list[str]:
    args = [x.requires_grad_() for x in operands(LONG)]
    gradient = torch.ones(LONG)

    def forward() -> Tensor:
        with torch.no_grad():
            return fastattn.scaled_dot_product_attention(*args)

    def both() -> tuple[Tensor, ...]:
        out = fastattn.scaled_dot_product_attention(*args)
        return torch.autograd.grad(out, args, gradient)

    size = args[0].numel() * args[0].itemsize
    lines = []
    for name, call in (("forward", forward), ("forward and backward", both)):
        extra = peak_extra_bytes(call)[1]
        told = "unknown here" if extra is None else f"{extra / 1e6:.1f} MB = {extra / size:.1f}"
        lines.append(f"{name}: {told} times a tensor of L x D")
    return lines


def main() -> None:
    from fastattn import _cpu

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dtype", default="fp32", type=one_dtype(list(DTYPES)))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{_cpu.build_info()['isa']}, {options.threads} threads, {options.dtype}")
    for shape in SHAPES:
        for causal in (False, True):
            label = f"{shape}{' causal' if causal else ''}"
            print(
                f"{label:28} {share(shape, causal, options.dtype, options.threads, options.rounds)}"
            )
    print(f"{LONG}, beyond the inputs, the result counted:")
    print("\n".join(extra_memory()))


if __name__ == "__main__":
    main()
