"""Runs the cases of a changed kernel until one fails: the process that tools/mutate.py starts.

    python mutant_judge.py LANGUAGE UNIT FOLDER SECONDS

FOLDER has a copy of the package and, for CUDA, the library for the emulator. The exit status is 1
if a case fails, which the last line names, and 0 if none does.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention_cases import PROOFS

import fastattn
from fastattn.testing import Target, Verdict

ATTENTION = ["scaled_dot_product_attention", "varlen_attention", "decode_attention"]
Work = Iterator[tuple[str, Any, torch.dtype, Any]]  # operator, case, dtype, target


def cpu_work(unit: str, folder: Path) -> Work:
    """The cases that test a CPU source, compiled for one instruction set."""
    target = Target("cpu", unit.split(".")[1])
    # Some instruction sets have nothing of their own but products of bf16.
    every = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    dtypes = [torch.bfloat16] if "512_bf16" in unit else every
    for op, proof in PROOFS.items():
        for n, case in enumerate(proof.cases):
            dtype = dtypes[n % len(dtypes)]
            if not case.slow and target.has_own_kernel(op, dtype):
                yield op, case, dtype, target


def cuda_work(unit: str, folder: Path) -> Work:
    """The cases that test a CUDA source, under the emulator."""
    import emulator
    import test_cuda
    import test_cuda_hopper as hopper
    from emulated import Emulated
    from test_cuda_operators import TABLES

    adapter = emulator.load_from(folder / f"out/_cuda{emulator.SUFFIX}")
    if unit.startswith("hopper/"):
        adapter._cuda.allow_hopper(True)
        cases = [(ATTENTION[0], case) for case in (*hopper.OWN, *hopper.EDGES)]
        cases += [(ATTENTION[1], case) for case in hopper.PACKED]
    else:
        named = [case for case in test_cuda.TABLE if case.name in test_cuda.NAMES]
        cases = [(ATTENTION[0], case) for case in (*named, *test_cuda.ONE_KEY)]
        cases += [(t.operator, case) for t in TABLES.values() for case in t.cases]
    dtype = torch.float32 if unit.endswith(".F32.o") else torch.bfloat16
    for n, (op, case) in enumerate(cases):
        for seed in (0, n + 1):  # copies arrive as late as allowed, or in random order
            yield op, case, dtype, Emulated(adapter, seed)


def triton_work(unit: str, folder: Path) -> Work:
    """The cases that test the Triton kernels, under the interpreter."""
    import triton_interpreter
    from test_triton_cases import WORK

    triton_interpreter.mend()
    yield from ((op, case, dtype, Target("triton")) for op, case, dtype in WORK)


def severity(verdict: Verdict) -> float:
    """The worst error / bound; inf for any other fault."""
    errors = {str(d) for d in verdict.deviations}
    return verdict.ratio if errors.issuperset(verdict.faults) else float("inf")


def main(language: str, unit: str, folder: str, seconds: str) -> str | None:
    """Return what is wrong, or None if the mutant survives."""
    assert Path(fastattn.__file__).is_relative_to(folder), fastattn.__file__
    # A source is named after its operator, or belongs to attention. Its cases run first.
    stem = Path(unit).name.lstrip("_")
    own = [op for op in PROOFS if op[:6] == stem[:6]] or ATTENTION
    choose = {"Cpu": cpu_work, "Cuda": cuda_work, "Triton": triton_work}[language]
    work = list(choose(unit, Path(folder)))
    random.Random(0).shuffle(work)  # cases of all kinds within the time limit
    work.sort(key=lambda item: item[0] not in own)
    end = time.monotonic() + float(seconds)
    for op, case, dtype, target in work:
        if dtype in case.dtypes and time.monotonic() < end:
            try:
                verdict = PROOFS[op](case, dtype, target)
            except Exception as error:
                return f"{op} {case.name}: {error!r}"
            if severity(verdict) >= 2:  # a right kernel has half a bound to spare
                return f"{op} {case.name}: {verdict.faults[0]}"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
