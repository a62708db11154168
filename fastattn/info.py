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
    """The choices for this machine, and the evidence for them."""
    attention = "scaled_dot_product_attention"
    queries = [("cpu", "backends", attention), ("cpu", "isa", ""), ("cpu", "gemm", "")]
    if evidence.processor("cuda").name:
        queries.append(("cuda", "backends", attention))
    found = []
    for device, what, op in queries:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            row = evidence.choose(what, device, op, dtype)
            use = _spelled(row.use)
            use += f" (from {row.least_queries} queries on)" * (row.least_queries > 0)
            names = {"device": device, "choice": what, "dtype": str(dtype).removeprefix("torch.")}
            found.append({**names, "use": use, "source": row.because})
    return found


def _spelled(use: Any) -> str:
    if isinstance(use, evidence.Gemm):
        return ", ".join(_field(name, x) for name, x in use._asdict().items() if x)
    return ", ".join(use) if isinstance(use, list) else str(use)


# The fields of evidence.Gemm.
_GEMM = {
    "y": "outputs by {}",
    "dx": "gradients of inputs by {}",
    "dw": "gradients of weights by {}",
    "few": "outputs of up to {} rows by ours",
    "min_one_row_weight": "of one row from {} on",
    "least": "outputs by torch below {}",
    "least_grad": "gradients by torch below {}",
    "ours_up_to": "outputs by ours up to {}",
    "small_up_to": "whole attention in one call up to {}",
    "layer_up_to": "a whole encoder layer in one call up to {}",
    "min_few_rows": "few rows are {} or more",
    "min_few_rows_weight": "few rows from {} a row on",
}


def _field(name: str, value: Any) -> str:
    if (name, value) == ("min_one_row_weight", evidence.ANY):
        return "of one row by torch"
    return _GEMM[name].format(_size(value))


def _size(value: Any) -> str:
    """The name of a library, a number of rows, or the number of products of a call."""
    if isinstance(value, str) or value < 2**10:
        return str(value)
    return "any size" if value >= 2**62 else f"{value:,} products"


def _cpu() -> dict[str, Any]:
    fields = cpuinfo()  # empty if not on Linux: fall back to `platform`
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota": _cgroup.cpu_quota(),
        "features": [
            name
            for name in CPU_FEATURES
            if name in flags or name in evidence.processor("cpu").features
        ],
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
    if shared is not None:
        others = ", ".join(name for name in runtimes if name != shared)
        return (
            f"{shared}, which torch and fastattn share; {others} is loaded too, by another library:"
            " if it computes in threads, they compete with ours for the cores"
        )
    return (
        f"WARNING: {len(runtimes)} runtimes: {', '.join(runtimes)}. torch and fastattn may have "
        "separate threads, which busy-wait and take the cores from each other: results are "
        "correct, but slower. OMP_WAIT_POLICY=passive helps"
    )


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
    for made in facts["choices"]:
        key = (f"{made['device']} {made['choice']}", made["use"], made["source"])
        rows.setdefault(key, []).append(made["dtype"])
    return [(what, f"{', '.join(d)}: {use} [{source}]") for (what, use, source), d in rows.items()]


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
