"""The first-use check of each operator has every CUDA kernel that the operator may launch.

The kernels are those among the symbols of the emulated module. Its launches are replaced by ones
that record the kernel and run nothing, so that a case takes no longer than its arguments.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import emulator
import pytest
from child_process import run_python
from mutants import Mutant
from test_cuda_selftest import copied_sources

RECORDED = Mutant(
    "a launch is recorded and runs nothing",
    "../launch.h",
    "++launches()[how.name];",
    "++launches()[std::to_string(reinterpret_cast<uintptr_t>(kernel))]; return;",
)
# launch() is compiled once more for the arguments of each kernel. The linker takes the first of the
# objects that have an inline function.
ARGUMENTS = ("Additive", "Attention", "Decode", "EncodeMemory", "Hopper", "Hops", "MergeStates",
             "Pairs", "Product", "Sinusoidal")  # fmt: skip
LAUNCHES = (
    '#include "hopper/common.h"\n#include "product.h"\n',
    "namespace fastattn {\nnamespace cuda {\n",
    *(
        f"template void launch(const Launch&, void (*)({of}Arguments), const {of}Arguments&);\n"
        for of in ARGUMENTS
    ),
    "}\n}\n",
)

# Prints the kernels that each operator launches on each GPU in each dtype: in its check, and in all
# cases of all operators.
RECORD = """
import collections, ctypes, functools, json, sys
from pathlib import Path
from types import SimpleNamespace
import emulator, torch
from emulated import Emulated
from fastattn import dispatch, selftest
from fastattn.testing.proofs import PROOFS
from fastattn.testing.selftest import SELFTESTS, _Here, cases_of
adapter = emulator.load_from(Path(sys.argv[1]))
native = adapter._cuda
known = ctypes.cast(ctypes.CDLL(sys.argv[1]).PyInit__cuda, ctypes.c_void_p).value
# What no kernel writes: a search of Hopfield then has taken one step.
torch.empty, torch.Tensor.new_empty = torch.ones, torch.Tensor.new_ones
launched, dtype_of, gpu = collections.defaultdict(set), {}, ""

def recorded(name):
    function = getattr(adapter, name)
    @functools.wraps(function)
    def call(*tensors, **options):
        native.take_launches()
        results = function(*tensors, **options)
        op = name.removesuffix("_backward")
        if op == name:  # a backward belongs to its forward, whatever the dtype of its gradients is
            dtype_of[op] = str(selftest._judged(tensors).dtype)
        launched[gpu, op, dtype_of[op]].update(int(at) - known for at in native.take_launches())
        return results
    return function if name == "why_not" else call

def run(op, cases):
    global gpu
    proof = PROOFS[op]
    for case in cases:
        for dtype in {torch.float32, torch.bfloat16, torch.float16}.intersection(case.dtypes):
            inputs = proof.make(case, dtype)
            if dispatch.reasons_of(adapter, op, *proof.primitive(inputs)):
                continue
            for gpu in ("tf32", "other") if dtype == torch.float32 else ("hopper", "other"):
                native.allow_hopper(gpu == "hopper")
                torch.backends.cuda.matmul.allow_tf32 = gpu == "tf32"
                _Here("cuda", device="cpu").results(proof, backend, inputs)

backend = SimpleNamespace(**{name: recorded(name) for name in adapter.__all__}, _cuda=native)
with Emulated(backend).active(), selftest.switched_off():
    checked = {}
    for op in SELFTESTS:
        launched.clear()
        run(op, cases_of("cuda", op))
        checked |= {key: found for key, found in launched.items() if key[1] == op}
    for op in SELFTESTS:
        run(op, [case for case in PROOFS[op].cases if not case.slow])
print(json.dumps([[*key, [*checked.get(key, ())], [*more]] for key, more in launched.items()]))
"""


def recorded_module(folder: Path) -> Path:
    """The emulated module with :data:`RECORDED`."""
    csrc = copied_sources(folder)
    RECORDED.put_into(csrc / "cuda/kernels")
    with (csrc / "cuda/kernels/sinusoidal.cu").open("a") as source:  # it compiles fast
        source.writelines(LAUNCHES)
    return emulator.build_changed(csrc, folder / "build", ["sinusoidal"], "F32")


def kernels_of(library: Path) -> dict[int, str]:
    """The kernels of a module by their address, which counts from that of PyInit__cuda."""
    shown = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    symbols = [(int(line[:16], 16), line[19:]) for line in shown.splitlines() if line[0] != " "]
    start = next(address for address, name in symbols if name == "PyInit__cuda")
    kernel = re.compile(r"void fastattn::cuda::(\w+_kernel<[^(]*>)\(fastattn::cuda::\w+\)")
    found = [(address, kernel.fullmatch(name)) for address, name in symbols]
    return {at - start: m[1].replace("fastattn::cuda::", "") for at, m in found if m is not None}


def shape_of(kernel: str) -> str:
    """The kernel without its widths."""
    return re.sub(r"\b\d+\b", "n", kernel)


@pytest.mark.complete
def test_every_kernel_of_an_operator_is_checked(tmp_path: Path) -> None:
    library = recorded_module(tmp_path)
    done = run_python("-c", RECORD, str(library))
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = kernels_of(library)
    unchecked: dict[str, list[str]] = {}
    seen: set[str] = set()
    for gpu, op, dtype, *addresses in json.loads(done.stdout):
        checked, launched = ({kernels[address] for address in of} for of in addresses)
        seen |= checked
        # An operator that launches a kernel of one width may launch those of all widths.
        shapes = set(map(shape_of, launched))
        launched |= {kernel for kernel in kernels.values() if shape_of(kernel) in shapes}
        if launched - checked:
            unchecked[f"{op} {dtype} {gpu}"] = sorted(launched - checked)
    assert not unchecked, json.dumps(unchecked, indent=1)
    assert set(kernels.values()) <= seen
