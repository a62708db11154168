"""What this machine can do at most, measured while the benchmark runs.

The peak of a dtype is the highest rate that any code on these cores could reach in it, whether a
kernel of ours uses that unit or not. Natively it is a loop of independent multiply-adds on
registers, of the fastest unit there is (or of reads over a buffer larger than the caches). Without
the native core, and on a GPU, the rate of `torch.mm`, or of `torch.sum`, is an estimate from below
and is called one. Copying is torch's everywhere; it counts what is read and what is written.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch

KINDS = ("fma_f32", "fma_f64", "dot_bf16", "dot_f16", "read_bandwidth", "copy_bandwidth")
KIND_OF_DTYPE = {"fp32": "fma_f32", "fp64": "fma_f64", "fp16": "dot_f16", "bf16": "dot_bf16"}
# The units that compute a dtype; the fastest is its peak. 16-bit floats are computed in fp32 too.
_UNITS = {
    "dot_bf16": ("tile_bf16", "dot_bf16", "fma_f32"),
    "dot_f16": ("tile_f16", "fma_f16", "fma_f32"),
}
# What a processor must have for a unit. One that has it, with a core that was built without the
# loop that measures it, is faster than what can be measured.
_FEATURES = {"tile_bf16": "amx_bf16", "tile_f16": "amx_fp16", "fma_f16": "avx512_fp16"}
# In words, after the dtype that they compute.
UNIT_NAMES = {
    "tile_bf16": "AMX tiles",
    "tile_f16": "AMX tiles",
    "fma_f16": "FMA",
    "dot_bf16": "dot products",
    "fma_f32": "as fp32 FMA",
}
_CHOOSING_SECONDS = 0.02
_MM_DTYPES = {"fma_f64": torch.float64, "dot_bf16": torch.bfloat16, "dot_f16": torch.float16}
_MM_SIZE = 768
_READ_ELEMENTS = 1 << 26  # 256 MB in fp32
_COPY_ELEMENTS = 1 << 25


class Rate(NamedTuple):
    """A rate in GFLOP/s (GB/s for a bandwidth), and how it was measured.

    method  "measured", or why it is no ceiling
    share   of its threads' time that this process got: less than 1 when others want the cores.
            Only a loop of arithmetic keeps all threads at work; what else is measured has 1
    unit    which of several units had it
    """

    rate: float
    method: str
    share: float = 1.0
    unit: str = ""


def kind_of(dtype: str, measured: Container[str]) -> str:
    """The kind of peak of a dtype, among those `measured`: old files have one for fp16 and fp32."""
    kind = KIND_OF_DTYPE[dtype]
    return "fma_f32" if kind == "dot_f16" and kind not in measured else kind


def measure_peak(kind: str, threads: int, seconds: float, device: str = "cpu") -> Rate:
    """The rate now, and for `seconds`: a longer load may get a lower clock."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of peak {kind!r}; known are {', '.join(KINDS)}")
    if kind == "copy_bandwidth":
        source = torch.ones(_COPY_ELEMENTS, device=device)
        target = torch.zeros_like(source)
        rate = _best_rate(lambda: target.copy_(source), 8 * _COPY_ELEMENTS, seconds, device)
        return Rate(rate, "torch copy")
    try:
        # By its adapter, which chooses the instruction set of each dtype.
        core = importlib.import_module("fastattn.backends.cpu")._cpu if device == "cpu" else None
    except ImportError:
        core = None
    if core is None:
        return Rate(*_estimate(kind, seconds, device))
    info = core.build_info()
    # The machine's peak is that of its best instruction set, whichever one is being measured.
    core.set_isa(info["supported"][-1])
    try:
        unit, unmeasured = _fastest(core, kind, threads)
        wall, cpu = time.perf_counter(), time.process_time()
        rate = float(core.measure_peak(unit, threads, seconds))
        share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
    finally:
        core.set_isa(info["isa"])
    method = f"without {unmeasured}, which was not built" if unmeasured else "measured"
    if kind == "read_bandwidth":
        return Rate(rate, method)
    return Rate(rate, method, share, unit if kind in _UNITS else "")


@functools.cache
def _fastest(core: Any, kind: str, threads: int) -> tuple[str, str]:
    """The fastest unit for this kind, found once; and a feature of this processor that no loop
    here measures, if there is one.
    """
    units = _UNITS.get(kind, (kind,))
    rates = {unit: core.measure_peak(unit, threads, _CHOOSING_SECONDS) for unit in units}
    features = core.processor()["features"]
    unmeasured = [_FEATURES[u] for u in units if not rates[u] and _FEATURES.get(u) in features]
    return max(units, key=lambda unit: rates[unit]), ", ".join(unmeasured)


def _estimate(kind: str, seconds: float, device: str) -> tuple[float, str]:
    if kind == "read_bandwidth":
        buffer = torch.ones(_READ_ELEMENTS, device=device)
        rate = _best_rate(buffer.sum, 4 * _READ_ELEMENTS, seconds, device)
        return rate, "torch.sum estimate"
    dtype = _MM_DTYPES.get(kind, torch.float32)
    size = _MM_SIZE if device == "cpu" else 8 * _MM_SIZE
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    rate = _best_rate(lambda: matrix @ matrix, 2 * size**3, seconds, device)
    return rate, "torch.mm estimate"


def synchronize(device: str) -> None:
    """Synchronizes the device; does nothing on a CPU."""
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
