"""What this machine can do at most, measured while the benchmark runs.

Natively it is a loop of independent fused multiply-adds on registers (or of reads over a buffer
larger than the caches). Without the native core, and on a GPU, the rate of `torch.mm`, or of
`torch.sum`, is an estimate from below and is called one. Copying is torch's everywhere; it counts
what is read and what is written.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

import torch

KINDS = ("fma_f32", "fma_f64", "dot_bf16", "read_bandwidth", "copy_bandwidth")
# The arithmetic that a dtype can count on; 16-bit floats other than bf16 are computed in fp32.
KIND_OF_DTYPE = {"fp32": "fma_f32", "fp16": "fma_f32", "bf16": "dot_bf16"}
_MM_SIZE = 768
_READ_ELEMENTS = 1 << 26  # 256 MB in fp32
_COPY_ELEMENTS = 1 << 25


def measure_peak(kind: str, threads: int, seconds: float, device: str = "cpu") -> tuple[float, str]:
    """The rate in GFLOP/s (GB/s for a bandwidth), and whether it is measured or an estimate."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of peak {kind!r}; known are {', '.join(KINDS)}")
    if kind == "copy_bandwidth":
        source = torch.ones(_COPY_ELEMENTS, device=device)
        target = torch.zeros_like(source)
        rate = _best_rate(lambda: target.copy_(source), 8 * _COPY_ELEMENTS, seconds, device)
        return rate, "torch copy"
    try:
        core = importlib.import_module("fastattn._cpu") if device == "cpu" else None
    except ImportError:
        core = None
    if core is None:
        return _estimate(kind, seconds, device)
    # A processor without bf16 arithmetic computes bf16 in fp32.
    kinds = ("dot_bf16", "fma_f32") if kind == "dot_bf16" else (kind,)
    info = core.build_info()
    # The machine's peak is that of its best instruction set, whichever one is being measured.
    core.set_isa(info["supported"][-1])
    try:
        return max(float(core.measure_peak(k, threads, seconds)) for k in kinds), "measured"
    finally:
        core.set_isa(info["isa"])


def _estimate(kind: str, seconds: float, device: str) -> tuple[float, str]:
    if kind == "read_bandwidth":
        buffer = torch.ones(_READ_ELEMENTS, device=device)
        rate = _best_rate(buffer.sum, 4 * _READ_ELEMENTS, seconds, device)
        return rate, "torch.sum estimate"
    dtype = {"fma_f64": torch.float64, "dot_bf16": torch.bfloat16}.get(kind, torch.float32)
    size = _MM_SIZE if device == "cpu" else 8 * _MM_SIZE
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    rate = _best_rate(lambda: matrix @ matrix, 2 * size**3, seconds, device)
    return rate, "torch.mm estimate"


def measure_with_share(
    kind: str, threads: int, seconds: float, device: str = "cpu"
) -> tuple[float, str, float]:
    """The same, and the share of its threads' time that this process got.

    Less than all of it when others want the cores. Only a loop of arithmetic keeps all threads at
    work from beginning to end; what else is measured has a share of 1.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    rate, method = measure_peak(kind, threads, seconds, device)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
    return rate, method, 1.0 if method != "measured" or kind == "read_bandwidth" else share


def synchronize(device: str) -> None:
    """Waits for what the device was told; a CPU has done it."""
    if device != "cpu":
        torch.accelerator.synchronize()


def _best_rate(call: Callable[[], object], work: int, seconds: float, device: str) -> float:
    call()
    synchronize(device)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return work / best / 1e9
