"""Runs a script in a process of its own, which ends there if it touches what it may not.

Each tensor that it places ends where a page begins that cannot be read.
"""

from __future__ import annotations

import ctypes
import mmap
from unittest import mock

import torch
from child_process import run_python
from torch import Tensor

from fastattn.testing import cases

_BEFORE = "import sys, torch, fenced\nfenced.everywhere()\n"


def run_fenced(script: str, *arguments: object) -> None:
    """Run ``script`` with ``sys.argv[1:]``; it prints what it is about to do."""
    whole = f"{_BEFORE}{script}\nprint('done')"
    child = run_python("-c", whole, *map(str, arguments), PYTHONFAULTHANDLER="1")
    last = child.stdout.strip().splitlines()[-1:]
    assert last == ["done"], f"died in {last}, status {child.returncode}\n{child.stderr[-2000:]}"


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
