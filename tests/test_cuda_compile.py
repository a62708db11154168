"""The CUDA kernels through the real compiler: no spills, and no more kernels than are documented.

Needs an nvcc; without one these say so. What the kernels compute is tested in test_cuda.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulator import build

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc/cuda/kernels").glob("*.cu"))
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

# docs/cuda-kernels.md names them. Of each element type:
KERNELS = {
    "additive": 7,
    "attention_forward": 6,
    "attention_backward": 12,
    "attention_weights": 4,
    "encode_memory": 6,
    "hopfield": 2,
    "hopper_forward": 12,
    "memory_hops": 15,
    "decode": 5,
    "sinusoidal": 2,
}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")


def is_for_hopper(source: Path) -> bool:
    return source.stem.startswith("hopper")


def compiled(source: Path, element: str, arch: str, folder: Path) -> dict[str, dict[str, int]]:
    """What ptxas says of every kernel: registers, and bytes of stack and spills."""
    assert NVCC is not None
    command = [NVCC, "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-cubin"]
    command += [f"-DFASTATTN_ELEMENT={element}", "-Xptxas=-v", "-Werror=all-warnings"]
    command += [str(source), "-o", str(folder / f"{source.stem}.{element}.{arch}.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {}
    for part in done.stderr.split("Compiling entry function ")[1:]:
        found = re.search(
            r"'(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            part,
            re.DOTALL,
        )
        assert found, part
        name, *numbers = found.groups()
        keys = ("stack", "stores", "loads", "registers")
        kernels[name] = dict(zip(keys, map(int, numbers), strict=True))
    return kernels


def check(source: Path, element: str, arch: str, folder: Path) -> None:
    kernels = compiled(source, element, arch, folder)
    assert len(kernels) == KERNELS[source.stem], list(kernels)
    spilling = {
        name: report
        for name, report in kernels.items()
        if report["stack"] or report["stores"] or report["loads"]
    }
    assert not spilling


def test_every_source_has_a_documented_count() -> None:
    assert [source.stem for source in SOURCES] == sorted(KERNELS)
    told = (ROOT / "docs/cuda-kernels.md").read_text()
    counts = {True: 0, False: 0}
    for source in SOURCES:
        counts[is_for_hopper(source)] += len(build.elements(source)) * KERNELS[source.stem]
    assert f"{counts[False]} an architecture" in told
    assert f"{counts[True]} for Hopper alone" in told


@needs_nvcc
def test_the_forward_kernels_do_not_spill(tmp_path: Path) -> None:
    check(ROOT / "csrc/cuda/kernels/attention_forward.cu", "Bf16", "80", tmp_path)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "element", "arch"),
    [
        pytest.param(source, element, arch, id=f"{source.stem}-{element}-{arch}")
        for source in SOURCES
        for element in build.elements(source)
        for arch in ("80", "90a")
        if arch == "90a" or not is_for_hopper(source)
    ],
)
def test_no_kernel_spills(source: Path, element: str, arch: str, tmp_path: Path) -> None:
    check(source, element, arch, tmp_path)


@needs_nvcc
@pytest.mark.slow
def test_the_wrappers_assemble(tmp_path: Path) -> None:
    """Every instruction of csrc/cuda/ptx, by the kernels of the conformance tests."""
    includes = [flag.replace("-isystem", "-I") for flag in build._python_flags()]
    for arch in ("80", "90a"):
        command = [str(NVCC), "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        command += [*includes, "-cubin", str(ROOT / "tests/emulator/conformance/module.cu")]
        done = subprocess.run(
            [*command, "-o", os.fspath(tmp_path / f"{arch}.cubin")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
