"""`fastattn doctor`: finds common causes of slow or wrong attention here, and their fixes.

Every check reads the facts of `fastattn info`, and returns a :class:`Finding` or None.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import sys
import timeit
from typing import Any, NamedTuple

import torch

from fastattn import compat, evidence, info
from fastattn._version import __version__
from fastattn.ops.linear import linear, products_are_scalar

Facts = dict[str, Any]

# The instruction sets above the baseline, weakest first, and the processor's feature without which
# each is of no use.
NEEDED_FEATURE = {
    "avx2": "avx2",
    "avx512": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "armv8_6": "bf16",
}

REINSTALL = "`pip install --force-reinstall --no-deps --no-cache-dir fastattn`, or `make build`"

# How to fix a missing native core: the first whose words are in the reason. csrc/plans writes the
# reasons of the build, csrc/cpu/isa.cpp the one of FASTATTN_CPU_ISA. Words, level, fix.
_INSTALL = "install a C++17 compiler with OpenMP (Debian: `apt-get install g++`), then "
FIXES_OF_CORE = (
    ("FASTATTN_CPU_ISA", "problem", "unset FASTATTN_CPU_ISA"),
    ("on Linux only", "note", "use Linux, for example in WSL or a container"),
    ("compiler", "problem", _INSTALL + REINSTALL),
    ("", "problem", REINSTALL),
)
# How to build again with a missing instruction set, by words of the reason from csrc/plans/cpu.py.
FIXES_OF_BUILD = {
    "not requested": "without FASTATTN_CPU_ISAS=native",
    " rejects ": "with a newer compiler",
}


class Finding(NamedTuple):
    level: str  # "problem": costs speed or results; "note": may be intended
    what: str
    fix: str


def collect() -> Facts:
    """Return the facts of `info`, and measured facts."""
    return {
        **info.collect(),
        # No constant expression, which Python's compiler would evaluate.
        "flushes_subnormals": sys.float_info.min / 2 == 0,
        "subnormal_slowdown": _subnormal_slowdown(),
        "linear_layers": _linear_layers(),
    }


def _linear_layers() -> dict[str, dict[str, float]]:
    """GFLOP/s of linear layers by dtype and GEMM: float32, and dtypes with scalar code in torch."""
    m, k, n = 64, 768, 768
    scalar = [dtype for dtype in (torch.bfloat16, torch.float16) if products_are_scalar(dtype)]
    speeds = {}
    for dtype in (torch.float32, *scalar) if scalar else ():
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        speeds[str(dtype).removeprefix("torch.")] = {
            gemm: 2e-9 * m * k * n / min(timeit.repeat(call, number=1, repeat=10))
            for gemm, call in {
                "torch": functools.partial(torch.nn.functional.linear, x, weight),
                "ours": functools.partial(linear, x, weight),
            }.items()
        }
    return speeds


def _subnormal_slowdown() -> float:
    """How many times longer a product takes with a subnormal result than with a normal one."""
    x = torch.full((1 << 14,), 2.0**-100)
    out = torch.empty_like(x)
    normal, subnormal = (
        min(timeit.repeat(functools.partial(torch.mul, x, y, out=out), number=1, repeat=20))
        for y in (2.0**-10, 2.0**-40)  # a float32 below 2**-126 is subnormal
    )
    return subnormal / normal


# -- the checks -----------------------------------------------------------------------------------


def torch_version(facts: Facts) -> Finding | None:
    """A torch newer than every tested version, or without names that the fast route needs.

    The import of fastattn raises for a version out of the supported range.
    """
    newest = ".".join(map(str, compat.NEWEST_TESTED))
    if facts["fast_route_lacks"]:
        return Finding(
            "problem",
            f"torch {facts['torch']} lacks {', '.join(facts['fast_route_lacks'])}, so every call "
            "takes a slower route",
            f"look for a newer fastattn, or `pip install 'torch<={newest}'`",
        )
    if facts["torch_untested"]:
        return Finding(
            "note",
            f"torch {facts['torch']} is newer than {newest}, the newest version tested",
            "run `fastattn verify --quick`, or look for a newer fastattn",
        )
    return None


def native_core(facts: Facts) -> Finding | None:
    """A native core, the module with the kernels for the CPU, that is not built or not loaded."""
    backend = facts["backends"]["cpu"]
    if backend["built"]:
        return None
    reason = backend["reason"]
    what = f"there is no native core, so all calls on the CPU run in plain PyTorch: {reason}"
    level, fix = next((level, fix) for words, level, fix in FIXES_OF_CORE if words in reason)
    return Finding(level, what, fix)


def cuda_kernels(facts: Facts) -> Finding | None:
    """CUDA kernels that are installed but cannot be used, such as kernels of another version."""
    reason = facts["backends"]["cuda"]["reason"] or ""
    _, unusable, error = reason.partition("cannot be used: ")  # fastattn.builds writes it
    if not unusable:
        return None
    fix = f"`pip install fastattn-cuda=={__version__}`, or `pip uninstall fastattn-cuda`"
    return Finding("problem", f"the CUDA kernels cannot be used: {error}", fix)


def fresh_build(facts: Facts) -> Finding | None:
    """A native core that was built from older sources."""
    if not facts["backends"]["cpu"].get("stale"):
        return None
    return Finding("problem", "csrc has changed since the kernels were built", "`make build`")


def measured_gpu(facts: Facts) -> Finding | None:
    """A GPU on which fastattn's kernels are unverified, so PyTorch's or the reference run."""
    sources = [choice["source"] for choice in facts["choices"] if choice["device"] == "cuda"]
    if evidence.UNVERIFIED not in sources:
        return None
    what = "our kernels are unverified on this GPU, so PyTorch's or the slow reference run"
    return Finding("note", what, "run `fastattn tune`, which verifies, measures and admits them")


def complete_build(facts: Facts) -> Finding | None:
    """A build without the instruction set that would be chosen for this processor."""
    left_out = facts["backends"]["cpu"].get("left_out") or {}
    if facts["isa"] is None:  # native_core says why
        return None
    usable = ["baseline"] + [  # here, if the build had them all
        isa for isa, feature in NEEDED_FEATURE.items()
        if isa in facts["isa"]["supported"]
        or (isa in left_out and feature in facts["cpu"]["features"])
    ]  # fmt: skip
    # Such as "avx512,bfloat16=amx_bf16".
    chosen = {part.rpartition("=")[2] for part in evidence.isa(usable).split(",")}
    reasons = {isa: left_out[isa] for isa in usable if isa in chosen and isa in left_out}
    if not reasons:
        return None
    lacking = "; ".join(f"{isa}: {reason}" for isa, reason in reasons.items())
    fixes = [fix for words, fix in FIXES_OF_BUILD.items() if words in lacking]
    return Finding(
        "problem",
        f"the build lacks instruction sets that are the choice for this processor: {lacking}",
        f"build again {' and '.join(fixes) or 'on this machine'}: {REINSTALL}",
    )


def instruction_set(facts: Facts) -> Finding | None:
    """FASTATTN_CPU_ISA, if it forces another instruction set than the measured choice."""
    forced, isa = facts["environment"].get("FASTATTN_CPU_ISA"), facts["isa"]
    if not forced or isa is None:
        return None
    chosen = evidence.isa(isa["supported"])
    if isa["isa"] == chosen:
        return None
    return Finding(
        "problem",
        f"FASTATTN_CPU_ISA forces {isa['isa']}; the choice for this processor is {chosen}",
        "unset FASTATTN_CPU_ISA; `fastattn tune` measures whether another choice is faster here",
    )


def tiles(facts: Facts) -> Finding | None:
    """AMX tiles that the processor has and the system does not let this process use."""
    # csrc/cpu/processor.cpp writes the reason.
    reason = ((facts["isa"] or {}).get("unsupported") or {}).get("amx_bf16", "")
    if not reason.startswith(("Linux refuses", "the system does not save")):
        return None
    return Finding(
        "problem",
        f"the processor has AMX, but {reason}; PyTorch's bfloat16 products are slower without, too",
        "use Linux 5.16 or later, and allow `arch_prctl` in the seccomp profile of the container",
    )


def one_openmp(facts: Facts) -> Finding | None:
    """A second OpenMP runtime in this process."""
    runtimes, shared = facts["openmp"]["runtimes"], facts["openmp"]["shared"]
    if len(runtimes) < 2:
        return None
    what = f"{len(runtimes)} OpenMP runtimes are loaded: {', '.join(runtimes)}"
    if shared is None:
        fix = "import torch before every other library, or set OMP_WAIT_POLICY=passive"
        return Finding("problem", f"{what}; their threads compete for the cores", fix)
    return Finding(
        "note",
        f"{what}; torch and fastattn share {shared}, another library brought the rest",
        "set OMP_WAIT_POLICY=passive if that library computes between calls of attention",
    )


def _cores(facts: Facts) -> int:
    """The cores that this process may use; all of them where the system does not say."""
    return facts["cpu"]["usable_cores"] or facts["cpu"]["cores"]


def threads(facts: Facts) -> Finding | None:
    """More threads than cores, or than the CPU quota of the container allows to run."""
    running, quota, cores = facts["threads"], facts["cpu"]["quota"], _cores(facts)
    if running > cores:
        what = f"on {cores} usable cores: each parallel loop waits for a thread that has no core"
    elif quota is not None and running > math.ceil(quota):
        what = (
            f"on the CPU time of {quota:g} cores, which the control group grants: Linux stops all "
            "threads when it is used up, many times a second"
        )
    else:
        return None
    best = max(1, math.floor(min(cores, quota or cores)))
    return Finding(
        "problem",
        f"torch runs {running} threads {what}",
        f"OMP_NUM_THREADS={best}, or torch.set_num_threads({best})",
    )


def idle_cores(facts: Facts) -> Finding | None:
    """OMP_NUM_THREADS, if it leaves half of the cores or more idle."""
    variable, cores = facts["environment"].get("OMP_NUM_THREADS"), _cores(facts)
    granted = min(cores, facts["cpu"]["quota"] or cores)
    if variable is None or facts["threads"] * 2 > granted:
        return None
    return Finding(
        "note",
        f"OMP_NUM_THREADS={variable}: torch uses {facts['threads']} of {granted:g} cores",
        "leave it so where several processes share the cores (torchrun sets 1); else unset it",
    )


def subnormals(facts: Facts) -> Finding | None:
    """Arithmetic that flushes subnormal numbers to zero, or is slow for them."""
    if facts["flushes_subnormals"]:
        return Finding(
            "problem",
            "numbers below 1.2e-38 become 0 in this process: a library that was built with "
            "-ffast-math has changed the processor's mode",
            "torch.set_flush_denormal(False) after the imports; if it was meant, nothing",
        )
    if facts["subnormal_slowdown"] < 8:
        return None
    return Finding(
        "note",
        f"products below 1.2e-38 take {facts['subnormal_slowdown']:.0f} times as long here",
        "torch.set_flush_denormal(True) if a model has weights or gradients that small",
    )


def linear_layers(facts: Facts) -> Finding | None:
    """16-bit linear layers that PyTorch computes by scalar code."""
    speeds = {dtype: gemms for dtype, gemms in facts["linear_layers"].items() if dtype != "float32"}
    if not speeds:
        return None
    float32 = facts["linear_layers"]["float32"]["torch"]
    slow = ", ".join(f"{dtype} at {gemms['torch']:.0f}" for dtype, gemms in speeds.items())
    fast = ", ".join(f"{dtype} {gemms['ours']:.0f}" for dtype, gemms in speeds.items())
    what = f"PyTorch's linear layers run in {slow} GFLOP/s here, in float32 at {float32:.0f}"
    return Finding("note", what, f"`fastattn.accelerate(model)` makes it {fast}")


def interpreted_triton(facts: Facts) -> Finding | None:
    """Triton kernels that are interpreted."""
    if facts["environment"].get("TRITON_INTERPRET", "0") != "1":
        return None
    what = "TRITON_INTERPRET=1: Triton's kernels are interpreted, thousands of times slower"
    return Finding("problem", what, "unset TRITON_INTERPRET")


CHECKS = (
    torch_version,
    native_core,
    cuda_kernels,
    fresh_build,
    measured_gpu,
    complete_build,
    instruction_set,
    tiles,
    one_openmp,
    threads,
    idle_cores,
    subnormals,
    linear_layers,
    interpreted_triton,
)


# -- the command ----------------------------------------------------------------------------------


def examine(facts: Facts) -> dict[str, Finding | None]:
    """The result of every check, by its name."""
    return {check.__name__: check(facts) for check in CHECKS}


def format_text(results: dict[str, Finding | None]) -> str:
    findings = [finding for finding in results.values() if finding]
    lines = [f"{finding.level}: {finding.what}\n    fix: {finding.fix}" for finding in findings]
    passed = len(results) - len(findings)
    return "\n".join([*lines, f"{passed} of {len(results)} checks found nothing"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module of your program first, to see what it loads and changes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    for name in args.modules:
        importlib.import_module(name)
    results = examine(collect())
    if args.json:
        print(json.dumps({n: f and f._asdict() for n, f in results.items()}, indent=2))
    else:
        print(format_text(results))
    return int(any(finding and finding.level == "problem" for finding in results.values()))
