"""Counts the instructions of the main GPU kernels, and writes docs/machine-code.md.

    python tests/support/machine_code.py CUBIN...   # writes it, from nvcc's cubins in bfloat16
    python tests/support/machine_code.py --triton   # prints which Triton kernels cost more, as JSON

The counts are kept in tests/cuda/machine_code.json, and tests/cuda/test_cuda_compile.py refuses
kernels that cost more. Triton's kernels are compiled here. Nothing is measured.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/emulator")]

import emulator  # noqa: E402
import sass  # noqa: E402
from issue_slots import MARGIN, MMA_SYNC, TENSOR_FLOPS, Slots, regressions, slots  # noqa: E402

COUNTS = ROOT / "tests/cuda/machine_code.json"
PAGE = ROOT / "docs/machine-code.md"
Kernels = dict[str, Slots]

# Of a multiprocessor: registers, threads, bytes of shared memory. CUDA programming guide.
REGISTERS, THREADS = 65536, 2048
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10}
RESERVED = 1024  # bytes of shared memory of a block that the system takes


_NAME = re.compile(r"\d((?:attention|decode)_\w+?)_kernelINS0_4Bf16E((?:Li\d+E)+)(Lb[01]E)?E")


def label_of(name: str) -> str | None:
    """The name of a main kernel without options, in bfloat16, and its widths; None for another."""
    found = _NAME.search(name)
    if found is None or found[1] not in MAIN or found[3] == "Lb1E":
        return None
    widths = re.findall(r"Li(\d+)E", found[2])
    return f"{found[1]} {'/'.join(widths)}"


MAIN = (
    *("attention_forward", "attention_backward_q", "attention_backward_kv", "decode_split"),
    *(f"attention_{one}_hopper" for one in ("forward", "backward_q", "backward_kv")),
)


def resources(cubin: Path) -> dict[str, int]:
    """The registers of a thread, by the name of the kernel."""
    cuobjdump = sass.find_tool("cuobjdump")
    assert cuobjdump is not None, "neither CUDA nor Triton brings cuobjdump along"
    command = [cuobjdump, "-res-usage", str(cubin)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {n: int(r) for n, r in re.findall(r"Function (\S+):\s+REG:(\d+)", printed)}


def all_of(cubin: Path) -> dict[str, Slots]:
    """Every kernel of a cubin, by its name."""
    nvdisasm = sass.find_tool("nvdisasm")
    assert nvdisasm is not None, "neither CUDA nor Triton brings nvdisasm along"
    registers = resources(cubin)
    codes = sass.disassembled(cubin, nvdisasm)
    return {name: slots(code, registers[name]) for name, code in codes.items()}


def main_kernels(cubin: Path) -> Kernels:
    """The main kernels of a cubin, by their labels."""
    found = {label_of(name): one for name, one in all_of(cubin).items()}
    return {label: one for label, one in found.items() if label is not None}


def kept() -> dict[str, Any]:
    """What is kept: "versions" of the compilers, and "kernels" of each chip."""
    read: dict[str, Any] = json.loads(COUNTS.read_text())
    for kernels in read["kernels"].values():
        kernels.update({label: Slots(**one) for label, one in kernels.items()})
    return read


def version_of_nvcc(nvcc: str) -> str:
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"release ([\d.]+)", printed)[0]


def version_of_triton() -> str:
    return ".".join(metadata.version("triton").split(".")[:2])


def faults(before: Kernels, now: Kernels) -> list[str]:
    """What costs more than what is kept, and kernels that are on one side alone."""
    apart = [f"{label}: only in one of them" for label in before.keys() ^ now.keys()]
    return apart + [
        f"{label}: {'; '.join(more)}"
        for label in before.keys() & now.keys()
        if (more := regressions(before[label], now[label]))
    ]


def shared_memory() -> dict[str, int]:
    """The bytes of a block, as the C++ compiler computes them from the source."""
    source = ROOT / "tests/cuda/shared_memory.cpp"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "print"
        command = [*emulator.compiler(), *emulator.COMMON, f"-I{ROOT / 'tests'}", str(source)]
        subprocess.run([*command, "-o", str(program)], check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {" ".join(words[:2]): int(words[2]) for words in map(str.split, printed.splitlines())}


def triton_kernels(chip: str) -> Kernels:
    """The kernels of Triton for attention and decoding in bfloat16 that a call launches."""
    from fastattn.testing import triton_aot as aot

    calls = {
        "triton forward 64": aot.attention(aot.HALF, 64),
        "triton forward 128": aot.attention(aot.HALF, 128),
        "triton backward 128": aot.attention(aot.HALF, 128, backward=True),
        "triton decode 128": aot.decode(aot.HALF, 128),
    }
    found = {}
    for name, call in calls.items():
        for recording in aot.recorded(call, chip):
            kernel = aot.binary(recording, chip)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                (one,) = all_of(Path(file.name)).values()
            if one.flops:  # the others prepare or merge
                known = kernel.metadata
                one = replace(one, threads=32 * known.num_warps, shared=known.shared)
                found[f"{name}: {known.name.strip('_')}"] = one
    return found


# -- the page --------------------------------------------------------------------------------------


def blocks(one: Slots, chip: str) -> int:
    """How many blocks fit on a multiprocessor, by their registers and shared memory."""
    by_registers = REGISTERS // (8 * -(-one.registers // 8) * one.threads)
    by_shared = SHARED[chip] // (one.shared + RESERVED)
    return min(by_registers, by_shared, THREADS // one.threads)


def threads_of(label: str) -> int:
    """The threads of a block, for a kernel in C++."""
    name, width = label.split()
    if "hopper" in name:
        return 384
    two = (name == "decode_split" and width == "256") or (
        name == "attention_backward_kv" and width != "64"
    )
    return 256 if two else 128


def table(chip: str, kernels: Kernels) -> Iterator[str]:
    heads = "registers | shared, KiB | blocks | issue | tensor | FMA | ALU | MUFU | LSU | barriers"
    heads += " | between waits: median, most"
    heads += " | predicted clocks: tensor, issue, FMA, ALU, MUFU, shared | shared bytes a kFLOP"
    yield f"| kernel | {heads} | predicted bound |"
    yield "| --- |" + " --- |" * 14
    for label, one in kernels.items():
        clocks = one.clocks(chip)
        cells = [one.registers, f"{one.shared / 1024:.0f}", blocks(one, chip)]
        cells += [one.issue, one.tensor, one.fma, one.alu]
        cells += [one.mufu, one.lsu, one.barriers]
        cells += [f"{one.between_waits:.0f}, {one.without_wait}"]
        order = ("tensor", "issue", "fma", "alu", "mufu", "shared")
        cells += [", ".join(f"{clocks[pipe]:.0f}" for pipe in order)]
        cells += [f"{1000 * one.shared_bytes / one.flops:.1f}"]
        pipe, share = one.bound(chip)
        bound = "only a part" if one.rolled else f"{pipe}: {share:.0%}"
        yield f"| {label} | {' | '.join(map(str, cells))} | {bound} |"


def beside_model(kernels: Kernels) -> Iterator[str]:
    """The clocks of a step of both consumers: counted, and by the model of docs/hopper.md."""
    model = runpy.run_path(str(ROOT / "docs/make_hopper_picture.py"))
    heads = "predicted for products: code, model | for exponentials: code, model | issue slots"
    yield f"| kernel | {heads} |"
    yield "| --- | --- | --- | --- |"
    for label, one in kernels.items():
        if "_hopper" not in label:
            continue
        name, widths = label.split()
        q, v = map(int, widths.split("/"))
        if "_kv_" in name and q > 128:  # the consumers have loops of their own
            continue
        if "forward" in name:
            clocks = model["Shape"](q, v).clocks
        else:
            clocks = model["Backward"](q, v, "_kv_" in name).clocks
        # A part of a multiprocessor has a warp of each consumer. The loop may have several steps.
        found = one.clocks("sm_90")
        steps = 2 * found["tensor"] / clocks["products"]
        code = {pipe: 2 * found[pipe] / steps for pipe in ("tensor", "mufu", "issue")}
        yield (
            f"| {label} | {code['tensor']:.0f}, {clocks['products']:.0f} "
            f"| {code['mufu']:.0f}, {clocks['exponentials']:.0f} | {code['issue']:.0f} |"
        )


INTRODUCTION = f"""# The machine code of the GPU kernels

**Every figure on this page is counted in the machine code or predicted from these counts. None is
measured.** The page is written by `python tests/support/machine_code.py` from the counts in
`tests/cuda/machine_code.json`. The tests that compile the kernels
(`tests/cuda/test_cuda_compile.py` for CUDA, `tests/triton/test_triton_aot.py` for Triton) fail if a
count grows by more than {MARGIN:.0%}. With other versions of nvcc or Triton they are skipped; in CI
(`.ci/run`) they fail. CI counts the forward kernels of attention and those of Triton; the other
sources, which take minutes to compile, are counted by `make test-full` where this nvcc is.

Each row is about the hottest loop of one kernel, in bfloat16 and without options. It counts what
one warp executes in one iteration, on the shortest path through the loop: all keys are visible, and
no barrier has to wait.

- **registers**: of a thread. For Hopper, those of the launch; its consumer warps have 232.
- **shared, KiB**: the shared memory of a block.
- **blocks**: how many fit on a multiprocessor at once, by their registers and shared memory.
- **issue** to **barriers**: numbers of instructions. "issue" is all of them.
- **between waits**: the numbers of instructions from one barrier at which a warp waits to the next.
  Those where it only arrives are left out. In between a warp runs independently of the others.
- **predicted clocks**: how long each pipe is busy in one of the four parts of a multiprocessor, if
  no other pipe delays it. The throughputs are those of the [CUDA programming
  guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#throughput-of-native-arithmetic-instructions).
  For each part of sm_80 they are {TENSOR_FLOPS["sm_80"]} FLOP a clock on 16-bit numbers
  and 16 lanes of FMA; for sm_90 {TENSOR_FLOPS["sm_90"]} FLOP with wgmma,
  {MMA_SYNC} of that with mma.sync, and 32 lanes. "shared" is the time of the next column.
- **shared bytes a kFLOP**: the shared memory that the instructions read and write, without the
  copies of TMA and cp.async.
- **predicted bound**: the busiest pipe, and the share of the tensor cores' peak that it allows if
  all other work overlaps with it. The kernel cannot be faster. "Only a part" means that the loop
  contains another loop with matrix products that is not unrolled. The body of the inner loop is
  counted once, so such a row shows changes of the code, but gives no bound.
"""


BESIDE = """The predicted clocks of one step of both consumer warpgroups, from the machine code and
from the model of [hopper.md](hopper.md). The kernels of dK and dV with more than 128 columns are
left out, because each of their consumers has a loop of its own.
"""


def page(found: dict[str, Kernels]) -> str:
    lines = [INTRODUCTION]
    for chip, kernels in found.items():
        lines += [f"## {chip}", "", *table(chip, kernels), ""]
    lines += ["## Compared with the model of hopper.md", ""]
    lines += [BESIDE]
    lines += [*beside_model(found["sm_90"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(cubins: list[Path]) -> None:
    found: dict[str, Kernels] = {"sm_80": {}, "sm_90": {}}
    shared = shared_memory()
    for cubin in cubins:
        for label, one in main_kernels(cubin).items():
            whole = replace(one, threads=threads_of(label), shared=shared[label])
            found["sm_90" if "hopper" in label else "sm_80"][label] = whole
    for chip, kernels in found.items():
        found[chip] = dict(sorted(kernels.items(), key=_order)) | triton_kernels(chip)
    document: dict[str, Any] = {
        "about": "counts of machine code, see docs/machine-code.md; nothing is measured",
        "versions": {"nvcc": version_of_nvcc("nvcc"), "triton": version_of_triton()},
        "kernels": {c: {k: one.to_json() for k, one in x.items()} for c, x in found.items()},
    }
    COUNTS.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page(found))


def _order(item: tuple[str, Slots]) -> tuple[int, list[int]]:
    name, widths = item[0].split()
    return MAIN.index(name), [int(width) for width in widths.split("/")]


if __name__ == "__main__":
    if sys.argv[1:] == ["--triton"]:
        before = kept()["kernels"]
        found = {
            chip: faults(
                {k: one for k, one in before[chip].items() if k.startswith("triton")},
                triton_kernels(chip),
            )
            for chip in before
        }
        print(json.dumps(found))
    elif len(sys.argv) == 1:
        raise SystemExit(__doc__)
    else:
        write([Path(name) for name in sys.argv[1:]])
