"""This machine: the facts that affect speed, without names or paths, and its measured peak rates.

The peak of a dtype is the highest rate that any code can reach on these cores, which the native
core measures. Without it, and on a GPU, the peak is estimated from below by the rate of `torch.mm`
or `torch.sum`, and marked as an estimate.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from fastattn import dispatch
from fastattn._processor import described
from fastattn._version import __version__
from fastattn.bench.results import Peak
from fastattn.info import CPU_FEATURES

# Vendor, family, models and name of a design; a hypervisor may hide the name of the processor.
_GENERATIONS: tuple[tuple[str, int, Collection[int], str], ...] = (
    ("AuthenticAMD", 23, range(0x30), "zen"),
    ("AuthenticAMD", 23, range(0x30, 0x100), "zen2"),
    ("AuthenticAMD", 25, {*range(0x10, 0x20), *range(0x60, 0x80), *range(0xA0, 0xB0)}, "zen4"),
    ("AuthenticAMD", 25, range(0x60), "zen3"),
    ("AuthenticAMD", 26, range(0x100), "zen5"),
    ("GenuineIntel", 6, (0x55,), "skylake"),
    ("GenuineIntel", 6, (0x6A, 0x6C), "ice-lake"),
    ("GenuineIntel", 6, (0x8F,), "sapphire-rapids"),
    ("GenuineIntel", 6, (0xCF,), "emerald-rapids"),
    ("GenuineIntel", 6, (0xAD, 0xAE), "granite-rapids"),
)
# The strongest of these is part of the folder name.
_NAMED_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")
# The parts of a processor's name that do not identify it.
_NOISE = re.compile(
    r"\((r|tm)\)|@.*|\b(cpu|processor|w(ith|/) .*graphics)\b|\b[\w]+-core\b", re.IGNORECASE
)


def processor_slug(environment: Mapping[str, Any]) -> str:
    """The folder in benchmarks/results for this machine.

    The name of the GPU; or the name, generation and strongest instruction set of the processor, as
    in `amd-epyc-zen4-avx512_bf16`. Records without `cpu_family` have no generation.
    """
    if gpu := environment.get("gpu"):
        return _slug(gpu)
    vendor, family, model = (environment.get(f"cpu_{key}") for key in ("vendor", "family", "model"))
    names = [of[3] for of in _GENERATIONS if of[:2] == (vendor, family) and model in of[2]]
    generation = (names or [f"family{family}-model{model}"])[0] if family else ""
    flags = environment["cpu_flags"]
    feature = next((flag for flag in _NAMED_FLAGS if flag in flags), "")
    parts = (_slug(_NOISE.sub(" ", environment["cpu"])), generation, feature)
    return "-".join(part for part in parts if part)


def _slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def last_level_bytes() -> int:
    """The size of the largest cache of a processor; 32 MB if the system does not report it."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        sizes = [path.read_text().strip() for path in caches]  # such as 512K
        return max(int(size[:-1]) << 10 * (1 + "KMG".index(size[-1])) for size in sizes)
    except (OSError, ValueError):
        return 32 << 20


def describe_environment(device: str = "cpu") -> dict[str, Any]:
    core, processor = native_core(), described()
    gpu = {} if device == "cpu" else {"gpu": torch.cuda.get_device_name()}
    return {
        "utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fastattn": __version__,
        "commit": _commit(),
        "isa": None if core is None else str(core.build_info()["isa"]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor["brand"] or platform.machine(),
        **{f"cpu_{key}": processor[key] for key in ("vendor", "family", "model")},
        "cpu_flags": [flag for flag in CPU_FEATURES if flag in processor["features"]],
        **gpu,
        "last_cache": last_level_bytes(),
        "cores": torch.get_num_threads(),
    }


def native_core() -> Any:
    """The native core or None, imported by its adapter, which sets the instruction sets."""
    return getattr(dispatch.load("cpu"), "_cpu", None)


def _commit() -> str | None:
    """The commit of the running checkout, with `-dirty` if the package differs from it."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words]
        return subprocess.check_output(command, text=True, timeout=10).strip()

    try:
        changed = git("status", "--porcelain", "--", "fastattn", "csrc", "setup.py")
        return git("rev-parse", "--short=12", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


# The kinds of peaks in words, and the unit of each rate.
KINDS = {
    "fma_f32": ("fp32 FMA", "GFLOP/s"),
    "fma_f64": ("fp64 FMA", "GFLOP/s"),
    "dot_bf16": ("bf16", "GFLOP/s"),
    "dot_f16": ("fp16", "GFLOP/s"),
    "read_bandwidth": ("reading memory", "GB/s"),
    "copy_bandwidth": ("copying it", "GB/s"),  # in older results
}
KIND_OF_DTYPE = {"fp32": "fma_f32", "fp64": "fma_f64", "fp16": "dot_f16", "bf16": "dot_bf16"}
# The units that can compute a dtype, 16-bit floats also in fp32; the fastest unit is its peak. If
# the native core was built without the loop for a unit that the processor has, the measured rate is
# below the peak.
_UNITS = {
    "dot_bf16": ("tile_bf16", "dot_bf16", "fma_f32"),
    "dot_f16": ("tile_f16", "fma_f16", "fma_f32"),
}
_UNIT = {  # each unit in words, and the required feature
    "tile_bf16": ("AMX tiles", "amx_bf16"),
    "tile_f16": ("AMX tiles", "amx_fp16"),
    "fma_f16": ("FMA", "avx512_fp16"),
    "dot_bf16": ("dot products", ""),
    "fma_f32": ("as fp32 FMA", ""),
}
_MM_DTYPES = {"fma_f64": torch.float64, "dot_bf16": torch.bfloat16, "dot_f16": torch.float16}
_MM_SIZE = 768
_READ = 1 << 26  # elements: 256 MB in fp32


def measure_peak(
    kind: str, threads: int, seconds: float, device: str = "cpu"
) -> tuple[Peak, float]:
    """Measures a peak for `seconds`; a longer load may run at a lower clock.

    Also returns the share of its threads' time that this process received: less than 1 if others
    use the cores. Only loops of arithmetic keep all threads busy; other measurements return 1.
    """
    core = native_core() if device == "cpu" else None
    if core is None:
        return _estimate(kind, seconds, device), 1.0
    info = core.build_info()
    # The machine's peak uses its best instruction set, even if another one is forced.
    core.set_isa(info["supported"][-1])
    try:
        unit, method = _fastest(core, kind, threads)
        wall, cpu = time.perf_counter(), time.process_time()
        rate = float(core.measure_peak(unit, threads, seconds))
        share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
    finally:
        core.set_isa(info["isa"])
    share = 1.0 if kind == "read_bandwidth" else share
    return Peak(rate, method, unit=unit if kind in _UNITS else ""), share


@functools.cache
def _fastest(core: Any, kind: str, threads: int) -> tuple[str, str]:
    """The fastest unit for this kind (cached), and the method: which units were not built in."""
    units = _UNITS.get(kind, (kind,))
    rates = {unit: core.measure_peak(unit, threads, 0.02) for unit in units}
    features = core.processor()["features"]
    needed = sorted(_UNIT[unit][1] for unit in units if len(units) > 1 and not rates[unit])
    unbuilt = ", ".join(name for name in needed if name in features)
    method = f"without {unbuilt}, which was not built" if unbuilt else "measured"
    return max(units, key=lambda unit: rates[unit]), method


def _estimate(kind: str, seconds: float, device: str) -> Peak:
    call: Callable[[], object]
    ones = functools.partial(torch.ones, device=device)
    if kind == "read_bandwidth":
        call, work, method = ones(_READ).sum, 4 * _READ, "torch.sum estimate"
    else:
        size = _MM_SIZE if device == "cpu" else 8 * _MM_SIZE
        matrix = ones(size, size, dtype=_MM_DTYPES.get(kind))
        call = functools.partial(torch.mm, matrix, matrix)
        work, method = 2 * size**3, "torch.mm estimate"
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return Peak(work / min(timer.blocked_autorange(min_run_time=seconds).times) / 1e9, method)


def synchronize(device: str) -> None:
    """Synchronizes the device; does nothing on a CPU."""
    if device != "cpu":
        torch.accelerator.synchronize()


def words_of(kind: str, peak: Peak) -> str:
    """The peak, how it was measured, and by which unit."""
    words, unit = KINDS[kind]
    if kind in _UNITS and (peak.unit or kind) in _UNIT:
        words += f" {_UNIT[peak.unit or kind][0]}"
    note = "" if peak.method == "measured" else f", {peak.method}"
    return f"{words} {peak.rate:.0f} {unit}{note}"
