"""The peak rates of this machine, measured during the benchmark.

The peak of a dtype is the highest rate that any code can reach on these cores, also on units that
fastattn does not use. The native core measures it by a loop of independent multiply-adds on the
registers of the fastest unit, or of reads over a buffer larger than the caches. Without the native
core, and on a GPU, it is estimated from below by the rate of `torch.mm` or `torch.sum`, and marked
as an estimate. The copy rate is that of torch; it counts both reads and writes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from fastattn.bench.environment import native_core
from fastattn.bench.results import Peak

# In words, and the unit of the rate.
KINDS = {
    "fma_f32": ("fp32 FMA", "GFLOP/s"),
    "fma_f64": ("fp64 FMA", "GFLOP/s"),
    "dot_bf16": ("bf16", "GFLOP/s"),
    "dot_f16": ("fp16", "GFLOP/s"),
    "read_bandwidth": ("reading memory", "GB/s"),
    "copy_bandwidth": ("copying it", "GB/s"),
}
KIND_OF_DTYPE = {"fp32": "fma_f32", "fp64": "fma_f64", "fp16": "dot_f16", "bf16": "dot_bf16"}
# The units that can compute a dtype, 16-bit floats also in fp32; the fastest one is its peak. In
# words, to follow the name of the dtype; and the feature that a unit needs: if a processor has it
# and the native core was built without the loop for it, the measured rate is below the peak.
_UNITS = {
    "dot_bf16": ("tile_bf16", "dot_bf16", "fma_f32"),
    "dot_f16": ("tile_f16", "fma_f16", "fma_f32"),
}
UNIT_NAMES = {
    "tile_bf16": "AMX tiles",
    "tile_f16": "AMX tiles",
    "fma_f16": "FMA",
    "dot_bf16": "dot products",
    "fma_f32": "as fp32 FMA",
}
_FEATURES = {"tile_bf16": "amx_bf16", "tile_f16": "amx_fp16", "fma_f16": "avx512_fp16"}
_CHOOSING_SECONDS = 0.02
_MM_DTYPES = {"fma_f64": torch.float64, "dot_bf16": torch.bfloat16, "dot_f16": torch.float16}
_MM_SIZE = 768
_READ, _COPIED = 1 << 26, 1 << 25  # elements: 256 and 128 MB in fp32
_ROOF_SECONDS = 0.3


def measure_peak(
    kind: str, threads: int, seconds: float, device: str = "cpu"
) -> tuple[Peak, float]:
    """Measures a peak for `seconds`; a longer load may run at a lower clock.

    Also returns the share of its threads' time that this process received: less than 1 if others
    use the cores. 1 for all but loops of arithmetic, which alone keep all threads busy.
    """
    core = native_core() if device == "cpu" else None
    if core is None or kind == "copy_bandwidth":
        return _estimate(kind, seconds, device), 1.0
    info = core.build_info()
    # The machine's peak is that of its best instruction set, also if another one is forced.
    core.set_isa(info["supported"][-1])
    try:
        unit, unmeasured = _fastest(core, kind, threads)
        wall, cpu = time.perf_counter(), time.process_time()
        rate = float(core.measure_peak(unit, threads, seconds))
        share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
    finally:
        core.set_isa(info["isa"])
    method = f"without {unmeasured}, which was not built" if unmeasured else "measured"
    share = 1.0 if kind == "read_bandwidth" else share
    return Peak(rate, method, unit=unit if kind in _UNITS else ""), share


@functools.cache
def _fastest(core: Any, kind: str, threads: int) -> tuple[str, str]:
    """The fastest unit for this kind (cached), and the features of this processor that were not
    built in, if any.
    """
    units = _UNITS.get(kind, (kind,))
    rates = {unit: core.measure_peak(unit, threads, _CHOOSING_SECONDS) for unit in units}
    features = core.processor()["features"]
    unmeasured = [_FEATURES[u] for u in units if not rates[u] and _FEATURES.get(u) in features]
    return max(units, key=lambda unit: rates[unit]), ", ".join(unmeasured)


def _estimate(kind: str, seconds: float, device: str) -> Peak:
    call: Callable[[], object]
    ones = functools.partial(torch.ones, device=device)
    if kind == "copy_bandwidth":
        call = functools.partial(ones(_COPIED).copy_, ones(_COPIED))
        work, method = 8 * _COPIED, "torch copy"
    elif kind == "read_bandwidth":
        call, work, method = ones(_READ).sum, 4 * _READ, "torch.sum estimate"
    else:
        size = _MM_SIZE if device == "cpu" else 8 * _MM_SIZE
        matrix = ones(size, size, dtype=_MM_DTYPES.get(kind))
        call = functools.partial(torch.mm, matrix, matrix)
        work, method = 2 * size**3, "torch.mm estimate"
    call()
    synchronize(device)
    best, end, now = float("inf"), time.perf_counter() + seconds, 0.0
    while now < end:
        start = time.perf_counter()
        call()
        synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
    return Peak(work / best / 1e9, method)


def synchronize(device: str) -> None:
    """Synchronizes the device; does nothing on a CPU."""
    if device != "cpu":
        torch.accelerator.synchronize()


def words_of(kind: str, peak: Peak) -> str:
    """The peak, how it was measured, and by which unit."""
    words, unit = KINDS[kind]
    if kind in _UNITS and (which := UNIT_NAMES.get(peak.unit or kind)):
        words += f" {which}"
    note = "" if peak.method == "measured" else f", {peak.method}"
    return f"{words} {peak.rate:.0f} {unit}{note}"


def measure_all(threads: int) -> tuple[dict[str, Peak], float]:
    """Measures every peak; also returns the least share of the cores that it received."""
    peaks, least = {}, 1.0
    for kind in KINDS:
        found, shares = zip(
            *(measure_peak(kind, threads, _ROOF_SECONDS) for _ in range(3)), strict=True
        )
        peaks[kind] = max(found, key=lambda peak: peak.rate)
        peaks[kind].samples = [peak.rate for peak in found]
        least = min(least, *shares)
    return peaks, least


def roof_lines(peaks: dict[str, Peak]) -> list[str]:
    """The peaks, and the intensity from which arithmetic is the limit."""
    lines, read = [], peaks["read_bandwidth"].rate
    for kind, peak in peaks.items():
        line = f"{words_of(kind, peak)} ({min(peak.samples):.1f} to {max(peak.samples):.1f})"
        if kind in KIND_OF_DTYPE.values():
            line += f"; the limit from {peak.rate / read:.1f} FLOP per byte on"
        lines.append(line)
    return lines
