"""What this machine can do at most, measured while the benchmark runs.

Natively it is a loop of independent fused multiply-adds on registers (or of reads over a buffer
larger than the caches). Without the native core the rate of `torch.mm`, or of `torch.sum`, is an
estimate from below and is called one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

import torch

KINDS = ("fma_f32", "fma_f64", "dot_bf16", "read_bandwidth")
# The arithmetic that a dtype can count on; 16-bit floats other than bf16 are computed in fp32.
KIND_OF_DTYPE = {"fp32": "fma_f32", "fp16": "fma_f32", "bf16": "dot_bf16"}
_MM_SIZE = 768
_READ_ELEMENTS = 1 << 26  # 256 MB in fp32


def measure_peak(kind: str, threads: int, seconds: float) -> tuple[float, str]:
    """The rate in GFLOP/s (GB/s for read_bandwidth), and whether it is measured or an estimate."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of peak {kind!r}; known are {', '.join(KINDS)}")
    try:
        core = importlib.import_module("fastattn._cpu")
    except ImportError:
        return _estimate(kind, seconds)
    # A processor without bf16 arithmetic computes bf16 in fp32.
    kinds = ("dot_bf16", "fma_f32") if kind == "dot_bf16" else (kind,)
    info = core.build_info()
    # The machine's peak is that of its best instruction set, whichever one is being measured.
    core.set_isa(info["supported"][-1])
    try:
        return max(float(core.measure_peak(k, threads, seconds)) for k in kinds), "measured"
    finally:
        core.set_isa(info["isa"])


def _estimate(kind: str, seconds: float) -> tuple[float, str]:
    if kind == "read_bandwidth":
        buffer = torch.ones(_READ_ELEMENTS)
        return _best_rate(buffer.sum, 4 * _READ_ELEMENTS, seconds), "torch.sum estimate"
    dtype = {"fma_f64": torch.float64, "dot_bf16": torch.bfloat16}.get(kind, torch.float32)
    matrix = torch.ones(_MM_SIZE, _MM_SIZE, dtype=dtype)
    return _best_rate(lambda: matrix @ matrix, 2 * _MM_SIZE**3, seconds), "torch.mm estimate"


def _best_rate(call: Callable[[], object], work: int, seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return work / best / 1e9
