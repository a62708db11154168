"""What the compiler made of kernels: the instructions of a cubin, as nvdisasm tells them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import emulator

FOLDER = emulator.ROOT / "csrc/cuda/kernels"
SOURCES = sorted(FOLDER.rglob("*.cu"))

# docs/cuda-kernels.md names them. Of each element type:
KERNELS = {
    "additive": 7,
    "sdpa_forward": 6,
    "sdpa_backward": 12,
    "sdpa_weights": 10,
    "encode_memory": 6,
    "hopfield": 2,
    "hopper/sdpa_backward": 22,
    "hopper/sdpa_forward": 10,
    "memory_hops": 15,
    "merge_states": 4,
    "decode": 5,
    "sinusoidal": 2,
}


def find_tool(name: str) -> str | None:
    """Nvdisasm or cuobjdump of a CUDA toolkit, or the one that Triton brings along."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    triton = importlib.util.find_spec("triton")
    if found or triton is None or triton.origin is None:
        return found
    return shutil.which(Path(triton.origin).parent / "backends/nvidia/bin" / name)


@dataclass
class Code:
    """The instructions of a kernel in order, `@P0 BRA `(.L_x_3)`, and the places of its labels."""

    lines: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def find(self, text: str) -> int:
        return next(n for n, line in enumerate(self.lines) if text in line)

    def reachable(self, start: int) -> list[str]:
        """What may run after the instruction `start`, that one included."""
        reached: set[int] = set()
        ahead = [start]
        while ahead:
            n = ahead.pop()
            if n in reached or n >= len(self.lines):
                continue
            reached.add(n)
            line = self.lines[n]
            assert "BRX" not in line, "a jump to a computed address"
            ahead += [self.labels[name] for name in re.findall(r"`\((\.L_\w+)\)", line)]
            if not re.match(r"(BRA |EXIT|RET)", line):  # neither is there a predicate
                ahead.append(n + 1)
        return [self.lines[n] for n in sorted(reached)]


def disassembled(cubin: Path, nvdisasm: str) -> dict[str, Code]:
    """Every kernel by its name."""
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    return parsed(done.stdout)


def parsed(text: str) -> dict[str, Code]:
    """Every kernel of what nvdisasm prints."""
    kernels: dict[str, Code] = {}
    for line in text.splitlines():
        if name := re.match(r"\s*\.text\.(\w+):", line):
            code = kernels[name[1]] = Code()
        elif label := re.match(r"(\.L_\w+):", line):
            code.labels[label[1]] = len(code.lines)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.lines.append(found[1])
    return kernels


def highest_register(lines: list[str]) -> int:
    """The greatest n of the registers Rn that are named; an instruction may use some beyond it."""
    return max(int(n) for line in lines for n in re.findall(r"\bR(\d+)\b", line))


def name_of(source: Path) -> str:
    return source.relative_to(FOLDER).with_suffix("").as_posix()


def documented() -> tuple[int, int]:
    """Kernels of an architecture, and beside them those for Hopper."""
    counts = {True: 0, False: 0}
    for source in SOURCES:
        counts[emulator.is_for_hopper(source)] += (
            len(emulator.elements(source)) * KERNELS[name_of(source)]
        )
    return counts[False], counts[True]


def check_library(library: Path) -> None:
    """Of all that was built: as many kernels as are documented, and none has local memory."""
    cuobjdump = find_tool("cuobjdump")
    assert cuobjdump is not None, "neither CUDA nor Triton brings cuobjdump along"
    command = [cuobjdump, "-res-usage", str(library)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    assert [name for name, stack, local in found if (stack, local) != ("0", "0")] == []
    everywhere, for_hopper = documented()
    assert len(found) == 2 * everywhere + for_hopper  # for 8.0 and 9.0
