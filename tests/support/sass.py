"""The tools of a CUDA toolkit, and their reports on compiled kernels."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import emulator

FOLDER = emulator.ROOT / "csrc/cuda/kernels"
SOURCES = sorted(FOLDER.rglob("*.cu"))


def find_tool(name: str) -> str | None:
    """Path of a program of a CUDA toolkit, or of the copy that Triton ships."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    triton = importlib.util.find_spec("triton")
    if found or triton is None or triton.origin is None:
        return found
    return shutil.which(Path(triton.origin).parent / "backends/nvidia/bin" / name)


def name_of(source: Path) -> str:
    """The name of a source, by its path."""
    return source.relative_to(FOLDER).with_suffix("").as_posix()


def disassemble(cubin: Path, nvdisasm: str) -> dict[str, str]:
    """The instructions of every kernel of a cubin, by the kernel's mangled name."""
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    names_and_bodies = re.split(r"\n\s*\.text\.(\w+):", done.stdout)[1:]
    return dict(zip(names_and_bodies[::2], names_and_bodies[1::2], strict=True))


def check_library(library: Path) -> None:
    """No kernel of a built module uses local memory, and every architecture has kernels."""
    cuobjdump = find_tool("cuobjdump")
    assert cuobjdump is not None, "neither CUDA nor Triton provides cuobjdump"
    command = [cuobjdump, "-res-usage", str(library)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    assert [name for name, stack, local in usage if (stack, local) != ("0", "0")] == []
    assert {"sm_80", "sm_90", "sm_90a"} <= set(re.findall(r"\bsm_\d+a?\b", printed))
    assert sum("hopper" in name for name, _, _ in usage) >= 2 * 32  # 32 of each 16-bit type
    assert len(usage) > 400
