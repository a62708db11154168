"""`fastattn info`: versions, features of the processor, and backends.

The report is also for bug reports, so nothing here may raise if something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from fastattn import _cgroup, builds, compat, evidence
from fastattn import _openmp as _openmp_runtimes
from fastattn._processor import cpuinfo
from fastattn._version import __version__
from fastattn.dispatch import BACKENDS
from fastattn.evidence import ANY, ATTENTION, Gemm

# The CPU flags that affect the speed of attention, out of the hundred that Linux lists.
CPU_FEATURES = """
    avx avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_fp16 avx512_vnni
    amx_tile amx_bf16 amx_fp16 amx_int8 asimd fphp asimdhp bf16 sve sve2 sme
""".split()

# Prefixes of the environment variables that affect kernels and threads.
VARIABLES = ("FASTATTN_", "GOMP_", "KMP_", "MKL_", "OMP_", "TRITON_")


def collect() -> dict[str, Any]:
    """Return everything that `info` prints, as JSON-compatible values."""
    native = builds.native_module("cpu")
    return {
        "fastattn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_untested": compat.is_untested(),
        "torch_lacks": compat.LACKING,
        "fast_route_lacks": compat.MISSING,
        "numpy": builds.version_of("numpy"),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "openmp": _openmp(),
        "isa": native["build_info"],
        "choices": _choices(),
        "backends": {name: builds.backend(name) for name in BACKENDS},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


def _choices() -> list[dict[str, str]]:
    """The choices of fastattn.evidence for this machine, and the reasons for them."""
    queries = [("cpu", "backends", ATTENTION), ("cpu", "isa", ""), ("cpu", "gemm", "")]
    if evidence.processor("cuda").name:
        queries.append(("cuda", "backends", ATTENTION))
    choices = []
    for device, what, op in queries:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            row = evidence.choose(what, device, op, dtype)
            use = _use_text(row.use)
            use += f" (from {row.least_queries} queries on)" * (row.least_queries > 0)
            choice = {"device": device, "choice": what, "dtype": str(dtype).removeprefix("torch.")}
            choices.append({**choice, "use": use, "source": row.because})
    return choices


def _use_text(use: Any) -> str:
    """A choice as text: an order of backends, an instruction set, or the set fields of a Gemm."""
    if isinstance(use, Gemm):
        fields = ((name, "∞" if x == ANY else x) for name, x in use._asdict().items() if x)
        return ", ".join(f"{name}={x}" for name, x in fields)
    return ", ".join(use) if isinstance(use, list) else str(use)


def _cpu() -> dict[str, Any]:
    """The processor, its cores, and how many of them this process may use."""
    fields = cpuinfo()  # empty if not on Linux: fall back to `platform`
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota": _cgroup.cpu_quota(),
        "features": [x for x in CPU_FEATURES if x in {*flags, *evidence.processor("cpu").features}],
    }


def _openmp() -> dict[str, Any]:
    """The OpenMP runtimes in this process, and which of them PyTorch and the native module use."""
    shared = _openmp_runtimes.in_use()
    return {
        "runtimes": [Path(path).name for path in _openmp_runtimes.runtimes()],
        "shared": None if shared is None else Path(shared).name,
    }


def _openmp_text(openmp: dict[str, Any]) -> str:
    runtimes, shared = openmp["runtimes"], openmp["shared"]
    if len(runtimes) < 2:
        return ", ".join(runtimes) or "none loaded"
    if shared is None:
        names = f"{len(runtimes)} runtimes: {', '.join(runtimes)}"
        return f"WARNING: {names}, whose threads compete: see `fastattn doctor`"
    others = ", ".join(name for name in runtimes if name != shared)
    return f"{shared}, which torch and fastattn share; {others} is loaded too"


def format_text(facts: dict[str, Any]) -> str:
    cpu = facts["cpu"]
    rows = [
        ("fastattn", facts["fastattn"]),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        ("torch", _torch_text(facts)),
        ("NumPy", facts["numpy"] or "not installed"),
        ("CPU", f"{cpu['model']} ({cpu['architecture']})"),
        ("features", " ".join(cpu["features"]) or "unknown"),
        ("cores", _cores_text(cpu)),
        ("threads", f"{facts['threads']} (torch.get_num_threads())"),
        ("OpenMP", _openmp_text(facts["openmp"])),
        *_isa_rows(facts),
        *_choice_rows(facts),
        *((f"backend {name}", _backend_text(name, facts)) for name in facts["backends"]),
        *((name, value) for name, value in facts["environment"].items()),
    ]
    if not any(name.startswith("FASTATTN_") for name in facts["environment"]):
        rows.append(("FASTATTN_*", "no variable is set"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _torch_text(facts: dict[str, Any]) -> str:
    text = str(facts["torch"])
    if facts["torch_untested"]:
        newest = ".".join(map(str, compat.NEWEST_TESTED))
        text += f" (untested version: the newest that was tested is {newest})"
    if facts["torch_lacks"]:
        text += f"; lacks {', '.join(facts['torch_lacks'])}: slower without"
    return text


def _cores_text(cpu: dict[str, Any]) -> str:
    text = str(cpu["cores"])
    if cpu["usable_cores"]:
        text += f", {cpu['usable_cores']} of them usable here"
    if cpu["quota"]:
        text += f", with the CPU time of {cpu['quota']:g} (quota of the control group)"
    return text


def _isa_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    isa = facts["isa"]
    if isa is None:
        return [("ISA", "none: there is no native core, everything runs in plain PyTorch")]
    left_out = facts["backends"]["cpu"].get("left_out") or {}
    unsupported = dict(isa["unsupported"])
    if "amx_bf16" in isa["supported"] and isa["no_float16_on_tiles"]:
        unsupported["float16 on amx_bf16"] = isa["no_float16_on_tiles"]
    return [
        ("ISA", f"{isa['isa']} in use"),
        ("  compiled", ", ".join(isa["compiled"])),
        ("  supported", ", ".join(isa["supported"])),
        *(("  unsupported", f"{name}: {reason}") for name, reason in unsupported.items()),
        *(("  left out", f"{name}: {reason}") for name, reason in left_out.items()),
    ]


def _choice_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """One row per choice; dtypes with the same choice share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for choice in facts["choices"]:
        key = (f"{choice['device']} {choice['choice']}", choice["use"], choice["source"])
        rows.setdefault(key, []).append(choice["dtype"])
    return [
        (name, f"{', '.join(dtypes)}: {use} [{source}]")
        for (name, use, source), dtypes in rows.items()
    ]


def _backend_text(name: str, facts: dict[str, Any]) -> str:
    backend = facts["backends"][name]
    if not backend["built"]:
        return f"not built: {backend['reason']}"
    if name == "reference":
        return "always available: plain PyTorch"
    if name == "torch":
        return f"the fused attention of torch {facts['torch']}"
    if name == "triton":
        if torch.cuda.is_available():
            return f"Triton {backend['version']}"
        if os.environ.get("TRITON_INTERPRET") == "1":
            return f"Triton {backend['version']}, interpreted: for tests"
        return f"Triton {backend['version']}, but PyTorch sees no GPU"
    text = f"built by {backend['compiler']}" if "compiler" in backend else "built"
    if name == "cuda" and not torch.cuda.is_available():
        text += "; not available: PyTorch finds no CUDA device"
    return text + "; csrc has changed since: `make build`" * backend.get("stale", False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else format_text(facts))
    return 0
