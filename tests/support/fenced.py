"""Runs a script in a process of its own, which crashes if it accesses memory outside its tensors.

Each tensor that it places ends where a page begins that cannot be read.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from unittest import mock

import torch
from child_process import run_python
from torch import Tensor

from fastattn.testing import cases

_BEFORE = "import sys, torch, fenced\nfenced.everywhere()\n"


def run_fenced(script: str, *arguments: object) -> None:
    """Run ``script`` with ``sys.argv[1:]``; it prints what it is about to do."""
    whole = f"{_BEFORE}{script}\nprint('done')"
    child = run_python("-c", whole, *map(str, arguments), PYTHONFAULTHANDLER="1", status=None)
    last = child.stdout.strip().splitlines()[-1:]
    assert last == ["done"], f"died in {last}, status {child.returncode}\n{child.stderr[-2000:]}"


CPU = "from fastattn.testing import targets\nrun_on = targets(emulated=True)\n"
EMULATED = "import emulator, emulated\nrun_on = [emulated.Emulated(emulator.load())]\n"
# Its arguments: which cases, and for each operator how many pairs of a case and a dtype to step by.
# Each target begins with another pair.
_CASES = """
from fastattn.dispatch import reasons_against
from attention_cases import PROOFS
for argument in sys.argv[2:]:
    operator, every = argument.split("=")
    proof = PROOFS[operator]
    cases = [case for case in proof.cases if sys.argv[1] == "complete" or not case.slow]
    for k, target in enumerate(run_on):
        with target.active() as backend:
            for n, case in enumerate(cases):
                for m, dtype in enumerate(case.dtypes):
                    if (n + m + k) % int(every) == 0 and target.has_own_kernel(operator, dtype):
                        print(operator, case.name, dtype, target, flush=True)
                        inputs = proof.make(case, dtype)
                        given = inputs.primitive()
                        if given is None or not reasons_against(backend, operator, *given):
                            target.results(backend, inputs)
"""


def run_cases(targets: str, which: str, steps: Mapping[str, int]) -> None:
    """Run the cases of operators on targets, from the complete tables or without slow cases."""
    run_fenced(
        targets + _CASES, which, *(f"{operator}={every}" for operator, every in steps.items())
    )


def everywhere() -> None:
    """Put a fence after every tensor that this process places from now on (Linux)."""
    cases.allocate = _allocate


def place(values: Tensor) -> Tensor:
    """``cases.place`` with a fence."""
    with mock.patch.object(cases, "allocate", _allocate):
        return cases.place(values)


def _allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor [numel] that ends at the end of the last accessible page."""
    size = max(numel * dtype.itemsize, 1)
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address + length, mmap.PAGESIZE, 0) != 0:  # 0 is PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect failed")
    count = length // dtype.itemsize
    buffer = torch.frombuffer(memory, dtype=dtype, count=count)
    return buffer[count - numel :]
