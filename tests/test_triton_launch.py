"""A kernel that was compiled once is found again, and run as Triton itself would run it.

In a process of its own: in this one Triton interprets. The driver writes down what it is told.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import REQUIRE_NATIVE

CODE = """
import torch, triton
from fastattn.backends import triton as backend
from fastattn.backends.triton import _launch
from fastattn.testing import triton_aot

told = []

class Utilities:
    def load_binary(self, *args): return 1, 1, 32, 0, 1024
    def get_device_properties(self, device): return {"max_shared_mem": 2**20}
    def unload_module(self, *args): pass

class Driver(triton_aot._Driver):
    utils = Utilities()
    def launcher_cls(self, source, metadata): return lambda *args: told.append(args)

triton.runtime.driver.set_active(Driver(triton_aot.CHIPS["sm_90"].target))
_launch.architecture_of = lambda device: "sm_90"
compiled_by_triton = []
run = triton.runtime.JITFunction.run
def counted(self, *args, **kwargs):
    compiled_by_triton.append(self)
    return run(self, *args, **kwargs)
triton.runtime.JITFunction.run = counted

options = {"layout": "interleaved", "max_timescale": 1e4, "scale": 8.0, "padding_idx": None}
def call(rows, dtype=torch.float32, offset=0):
    x = torch.empty(2, rows, 64, dtype=dtype, device="meta")
    told.clear(), compiled_by_triton.clear()
    backend.sinusoidal_encoding(x, None, offset=offset, **options)
    (args,) = told
    # Tensors are others in each call; what is left of hooks and metadata is for profilers.
    numbers = [tuple(a[1:]) if isinstance(a, tuple) else a for a in args[9:]]
    numbers = [n for n in numbers if not isinstance(n, torch.Tensor)]
    return args[:5], numbers, bool(compiled_by_triton)

first, again = call(48), call(48)
assert first[2] and not again[2], "the second launch went through Triton"
assert first[:2] == again[:2], (first, again)
assert call(32)[2] and call(48, torch.bfloat16)[2] and call(48, offset=1)[2]
assert not call(32)[2]

hook = lambda metadata: None
triton.knobs.runtime.launch_enter_hook.add(hook)
assert call(48)[2], "a profiler was not told"
triton.knobs.runtime.launch_enter_hook.remove(hook)
assert not call(48)[2]
"""


def test_a_warm_launch_is_that_of_triton() -> None:
    if importlib.util.find_spec("triton") is None and not REQUIRE_NATIVE:
        pytest.skip("triton is not installed")
    child = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert child.returncode == 0, child.stderr[-3000:]
