"""The CUDA kernels through the real compiler: no spills, and wgmma on Hopper.

Needs an nvcc and skips without one. test_cuda.py tests what the kernels compute.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import emulator
import pytest
import sass

ROOT = Path(__file__).resolve().parents[2]
NVCC = sass.find_tool("nvcc")

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")


def ptxas_reports(source: Path, element: str, arch: str, cubin: Path) -> dict[str, tuple[int, ...]]:
    """Compiles a source. Of every kernel: bytes of stack, of spill stores and of spill loads."""
    ptx = "90a" if emulator.is_for_hopper(source) else "80"  # as csrc/plans/cuda.py
    command = [str(NVCC), "-std=c++17", "-O3", f"-gencode=arch=compute_{ptx},code=sm_{arch}"]
    command += ["-cubin", f"-DFASTATTN_ELEMENT={element}", "-Xptxas=-v", "-Werror=all-warnings"]
    done = subprocess.run(
        [*command, source, "-o", cubin], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # C7510 and its neighbours: ptxas serializes the wgmma products of a kernel.
    assert "(C75" not in done.stderr, re.findall(r"\(C75\d+\).*", done.stderr)
    kernels = {}
    for report in done.stderr.split("Compiling entry function ")[1:]:
        usage = re.search(
            r"'(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            report,
            re.DOTALL,
        )
        assert usage, report
        name, *sizes = usage.groups()
        kernels[name] = tuple(map(int, sizes))
    return kernels


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "element", "arch"),
    [
        pytest.param(source, element, arch, id=f"{sass.name_of(source)}-{element}-{arch}")
        for source in sass.SOURCES
        for element in emulator.elements(source)
        for arch in (["90a"] if emulator.is_for_hopper(source) else ["80", "90"])
    ],
)
def test_kernels_compile_without_spills(
    source: Path, element: str, arch: str, tmp_path: Path
) -> None:
    cubin = tmp_path / "kernels.cubin"
    reports = ptxas_reports(source, element, arch, cubin)
    assert reports
    assert {name: sizes for name, sizes in reports.items() if any(sizes)} == {}
    if not emulator.is_for_hopper(source):
        return
    nvdisasm = sass.find_tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("there is no nvdisasm here")
    for name, text in sass.disassemble(cubin, nvdisasm).items():
        for instruction in ("HGMMA", "UTMALDG", "USETMAXREG"):
            assert instruction in text, (name, instruction)


def test_the_module_needs_no_header_of_cuda() -> None:
    """setup.py gives these to the C++ compiler alone."""
    command = [*emulator.compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Werror"]
    command += [*emulator._python_flags(), '-DFASTATTN_CUDA_ARCHS="80;90a"', "-DFASTATTN_HOPPER"]
    command.append(str(ROOT / "csrc/cuda/bindings.cpp"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_nvcc
def test_the_wrappers_assemble(tmp_path: Path) -> None:
    """Every instruction of csrc/cuda/ptx, by the kernels of the conformance tests."""
    for arch in ("80", "90a"):
        command = emulator.conformance_command(arch, tmp_path / f"{arch}.cubin", "-cubin")
        command[0] = str(NVCC)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
