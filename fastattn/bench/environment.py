"""The environment of a result: everything that affects speed, without names or paths."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fastattn._processor import described
from fastattn._version import __version__
from fastattn.bench.gauges import last_level_bytes

# The instruction sets that affect the speed of attention, out of a processor's long list.
_RELEVANT_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve"),
)
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
        "cpu_flags": [flag for flag in _RELEVANT_FLAGS if flag in processor["features"]],
        **gpu,
        "last_cache": last_level_bytes(),
        "cores": torch.get_num_threads(),
    }


def native_core() -> Any:
    """The native core, by its adapter, which chooses the instruction set of each dtype; or None."""
    try:
        return importlib.import_module("fastattn.backends.cpu")._cpu
    except ImportError:
        return None


def _commit() -> str | None:
    """The commit of the running checkout, with `-dirty` if the package differs from it."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", "fastattn", "csrc", "setup.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
