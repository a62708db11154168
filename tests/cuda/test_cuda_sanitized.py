"""The CUDA kernels under the emulator and AddressSanitizer, in a process and a build of their own.

Slow: the emulator and the kernels of two element types are compiled again.
"""

from __future__ import annotations

import subprocess
import sys

import emulator
import pytest
from child_process import run_python

# GCC warns of ASan's code as a variable that may be uninitialised: no error.
FLAGS = ("-fsanitize=address", "-g1", "-fno-omit-frame-pointer", "-Wno-error")
ELEMENTS = ("Bf16", "F32")

# Some cases of each operator. Then a call with a tensor that has one row less than the call says:
# it must be reported.
_RUN = """
import ctypes, sys, torch
from pathlib import Path
import emulator
from fastattn.testing import check
from fastattn.testing.packed import VarlenCase, check_varlen
from attention_cases import ATTENTION_CASES
from test_cuda_hopper import BACKWARD, EDGES, FORWARD, OWN, PACKED
import test_cuda_operators as operators
from test_cuda_operators import Emulated
adapter = emulator.load_from(Path(sys.argv[1]))
names = '''head_dim-33 everything mask-padding-poison results-2-out-lse-weights-mask gqa-causal
layout-transposed lengths-64x65-upper_left'''.split()
work = [("attention", check, [c for c in ATTENTION_CASES if c.name in names])]
for name, table in operators.TABLES.items():
    cases = [case for case in table.cases if not table.long(case)]
    work.append((name, table.check, cases[:: max(len(cases) // 5, 1)]))
for name, judge, cases in work:
    for n, case in enumerate(cases):
        for dtype in (torch.bfloat16, torch.float32):
            verdict = judge(case, dtype, Emulated(adapter, n))
            assert verdict.ok, (name, case.name, verdict.faults)
    print(name, len(cases), file=sys.stderr, flush=True)
adapter._cuda.allow_hopper(True)
adapter._cuda.take_launches()
for n, case in enumerate((*[c for c in OWN if not c.slow][::4], *EDGES[::2], PACKED[0])):
    judge = check_varlen if isinstance(case, VarlenCase) else check
    verdict = judge(case, torch.bfloat16, Emulated(adapter, n))
    assert verdict.ok, ("for Hopper", case.name, verdict.faults)
assert {FORWARD, *BACKWARD} <= set(adapter._cuda.take_launches())
adapter._cuda.allow_hopper(False)
print("right", flush=True)
x, short = (torch.zeros(1, 1, n, 64, dtype=torch.bfloat16) for n in (70, 69))
from fastattn.backends.primitives import AttentionOptions
memory = (ctypes.c_char * x.nbytes).from_address(short.data_ptr())
key = torch.frombuffer(memory, dtype=torch.bfloat16).view(x.shape)
adapter.scaled_dot_product_attention(x, key, x, options=AttentionOptions(scale=1.0))
print("missed", flush=True)
"""


def _runtime(name: str) -> str:
    """The path of a runtime library of the compiler."""
    command = [*emulator.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is of Linux")
def test_nothing_is_read_or_written_outside_tensors() -> None:
    library = emulator.build_with(FLAGS, emulator.ROOT / "build/emulator/address", ELEMENTS)
    preload = " ".join(map(_runtime, ("libasan.so", "libstdc++.so")))
    child = run_python(
        "-c", _RUN, str(library), LD_PRELOAD=preload, ASAN_OPTIONS="detect_leaks=0", status=None
    )
    assert child.stdout.split() == ["right"], child.stdout + child.stderr[-3000:]
    assert "heap-buffer-overflow" in child.stderr, child.stderr[-3000:]
    assert "READ of size" in child.stderr
