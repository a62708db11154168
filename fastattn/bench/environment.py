"""What a result was measured on: what decides speed, and no names or paths."""

from __future__ import annotations

import importlib
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fastattn._version import __version__
from fastattn.bench.caches import last_level_bytes

# The instruction sets that decide the speed of attention; a processor's full list would hide them.
_TELLING_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve"),
)


def describe_environment() -> dict[str, Any]:
    cpu, flags = _processor()
    return {
        "utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fastattn": __version__,
        "commit": _commit(),
        "isa": _isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cpu_flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "last_cache": last_level_bytes(),
        "cores": torch.get_num_threads(),
    }


def _processor() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields: dict[str, str] = {}
    for line in lines:  # the first processor's
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", platform.machine()), set(flags.split())


def _isa() -> str | None:
    """The instruction set that the native core chose; None when it is not built."""
    try:
        core = importlib.import_module("fastattn._cpu")
    except ImportError:
        return None
    return str(core.build_info()["isa"])


def _commit() -> str | None:
    """The commit of the checkout that is running, `-dirty` when the package differs from it."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run(
            [*command, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            [*command, "status", "--porcelain", "--", "fastattn", "csrc", "setup.py"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
