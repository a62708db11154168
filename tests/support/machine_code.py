"""Counts the instructions of the GPU kernels, and writes docs/machine-code.md.

    python tests/support/machine_code.py --write    # compiles all that is counted; minutes
    python tests/support/machine_code.py --triton   # prints which Triton kernels cost more, as JSON

The counts are kept in tests/cuda/machine_code.json, and tests/cuda/test_cuda_compile.py refuses
kernels that cost more. Nothing is measured.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
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

# What is counted, and by which target of make: source, element type and architecture.
EACH, NIGHT = "test-complete", "test-slow"
PLAIN = f"without options: {EACH}; with: {NIGHT}"
COUNTED = {
    ("sdpa_forward", "Bf16", "80"): EACH,
    ("sdpa_backward", "Bf16", "80"): EACH,
    ("decode", "Bf16", "80"): EACH,
    ("decode", "Bf16", "90"): EACH,
    ("hopper/sdpa_forward", "Bf16", "90a"): EACH,
    ("hopper/sdpa_backward", "Bf16", "90a"): PLAIN,
    ("memory_hops", "Bf16", "80"): EACH,
    ("additive", "Bf16", "80"): EACH,
    ("hopfield", "Bf16", "80"): EACH,
    ("encode_memory", "Bf16", "80"): EACH,
    ("merge_states", "Bf16", "80"): EACH,
    ("sinusoidal", "Bf16", "80"): EACH,
    ("sdpa_weights", "Bf16", "80"): NIGHT,
    ("sdpa_forward", "F32", "80"): NIGHT,
    ("sdpa_backward", "F32", "80"): NIGHT,
    ("decode", "F32", "80"): NIGHT,
}
CHIPS = {"80": "sm_80", "90": "sm_90", "90a": "sm_90"}
# The kernels whose loop is counted, if it has no options. Others are counted as a whole.
MAIN = (
    *("attention_forward", "attention_backward_q", "attention_backward_kv", "decode_split"),
    *(f"attention_{one}_hopper" for one in ("forward", "backward_q", "backward_kv")),
)

# Of a multiprocessor: registers, threads, bytes of shared memory. CUDA programming guide.
REGISTERS, THREADS = 65536, 2048
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10}
RESERVED = 1024  # bytes of shared memory of a block that the system takes


# -- kernels in C++ --------------------------------------------------------------------------------


def compile_command(source: Path, element: str, arch: str, cubin: Path) -> list[str]:
    """Compiles a source for one element type and architecture; ptxas reports on stderr."""
    nvcc = sass.find_tool("nvcc")
    assert nvcc is not None, "there is no nvcc here"
    ptx = "90a" if emulator.is_for_hopper(source) else "80"  # as setup.py
    command = [nvcc, "-std=c++17", "-O3", f"-gencode=arch=compute_{ptx},code=sm_{arch}", "-cubin"]
    command += [f"-DFASTATTN_ELEMENT={element}", "-Xptxas=-v", "-Werror=all-warnings"]
    return [*command, str(source), "-o", str(cubin)]


def _printed(tool: str, *arguments: str | Path, text: str | None = None) -> str:
    found = sass.find_tool(tool)
    assert found is not None, f"there is no {tool} here"
    command = [found, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def threads(cubin: Path) -> dict[str, int]:
    """The most of a block, by the name of the kernel."""
    sections = _printed("cuobjdump", "-elf", cubin).split("\n.nv.info.")[1:]
    launch_bounds = re.compile(r"(\w+)\n.*?EIATTR_MAX_THREADS\s+Format:.*?Value:\s+(0x\w+)", re.S)
    return {one[1]: int(one[2], 16) for one in map(launch_bounds.match, sections) if one}


def as_written(mangled: Iterable[str]) -> list[str]:
    """The names of kernels as in the source, `decode_split<Bf16, 64>`."""
    demangled = _printed("c++filt", text="\n".join(mangled)).replace("fastattn::cuda::", "")
    return ["".join(parts) for parts in re.findall(r"(\w+)_kernel(<.*?>)\(", demangled)]


def arguments_of(kernel: str) -> tuple[str, list[str]]:
    """`decode_split<Bf16, 64>` -> decode_split, [Bf16, 64]"""
    name, *arguments = re.findall(r"\w+", kernel)
    return name, arguments


def has_loop(kernel: str) -> bool:
    """Is its loop counted, and not the whole kernel?"""
    name, arguments = arguments_of(kernel)
    return name.startswith("triton") or (name in MAIN and "true" not in arguments)


def codes_of(cubin: Path) -> dict[str, tuple[sass.Code, int]]:
    """The instructions of every kernel of a cubin and the registers of a thread, by its name."""
    nvdisasm = sass.find_tool("nvdisasm")
    assert nvdisasm is not None, "there is no nvdisasm here"
    found = re.findall(r"Function (\S+):\s+REG:(\d+)", _printed("cuobjdump", "-res-usage", cubin))
    registers = {name: int(count) for name, count in found}
    codes = sass.disassembled(cubin, nvdisasm)
    return {name: (code, registers[name]) for name, code in codes.items()}


def slots_of(kernel: str, code: sass.Code, registers: int) -> Slots:
    """Of the loop of a kernel, or of all of its instructions."""
    if has_loop(kernel):
        one = slots(code, registers)
        # tf32 has half the rate of 16 bits.
        return replace(one, flops=2 * one.flops) if "F32" in kernel else one
    # Without labels there are no loops. NOPs pad the end. Waits are not in the order of the text.
    lines = [line.split("`")[0] for line in code.lines if line != "NOP"]
    return replace(slots(sass.Code(lines), registers), between_waits=0.0, without_wait=0)


def kernels_of(cubin: Path) -> Kernels:
    """Every kernel of a cubin, by its name in the source."""
    codes, of_block = codes_of(cubin), threads(cubin)
    return {
        kernel: replace(slots_of(kernel, *codes[name]), threads=of_block[name])
        for name, kernel in zip(codes, as_written(codes), strict=True)
    }


# The dynamic shared memory of a block, which no cubin tells, in C++ from the arguments of a kernel.
# What host code computes for a launch is not here.
_BACKWARD = "({2} ? BackwardShape<{0}, {1}>::kSharedBytes : BackwardShape<{0}, {1}>::kBits)"
_DELTA = "sizeof(HopperBackwardQShape<{1}, {1}, true>::SharedStorage)"
SHARED_BYTES = {
    "attention_forward": "ForwardShape<{0}, {1}, {2}>::kSharedBytes",
    "attention_backward_q": _BACKWARD,
    "attention_backward_kv": _BACKWARD,
    "attention_pairs": "BackwardShape<{0}, {1}>::kSharedBytes",
    "attention_mask": "sizeof(MaskTable)",
    "decode_split": "DecodeShape<{0}, {1}>::kSharedBytes",
    "attention_forward_hopper": "sizeof(HopperForwardShape<{1}, {2}, {3}>::SharedStorage)",
    "attention_backward_q_hopper": "sizeof(HopperBackwardQShape<{1}, {2}, {3}>::SharedStorage)",
    "attention_backward_delta_hopper": _DELTA,
    "attention_backward_kv_hopper": "sizeof(HopperBackwardKvShape<{1}, {2}, {3}>::SharedStorage)",
}


def kept() -> dict[str, Any]:
    """What is kept: "versions" of the compilers, and "kernels" of each chip."""
    read: dict[str, Any] = json.loads(COUNTS.read_text())
    for kernels in read["kernels"].values():
        kernels.update({label: Slots(**one) for label, one in kernels.items()})
    return read


def version_of_nvcc() -> str:
    return re.findall(r"release ([\d.]+)", _printed("nvcc", "--version"))[0]


def version_of_triton() -> str:
    return ".".join(metadata.version("triton").split(".")[:2])


def shared_memory(kernels: Iterable[str]) -> dict[str, int]:
    """The bytes of a block that the source tells, computed by the C++ compiler."""
    headers = "decode sdpa_backward sdpa_forward sdpa_weights"
    headers += " hopper/sdpa_backward_kv hopper/sdpa_backward_q hopper/sdpa_forward"
    program = ["#include <cstdio>", *(f'#include "{name}.h"' for name in headers.split())]
    program += ["using namespace fastattn::cuda;", "int main() {"]
    for kernel in kernels:
        name, arguments = arguments_of(kernel)
        if name in SHARED_BYTES:
            size = SHARED_BYTES[name].format(*arguments)
            program += [f'std::printf("{kernel}: %d\\n", static_cast<int>({size}));']
    with tempfile.TemporaryDirectory() as folder:
        command = [*emulator.compiler(), *emulator.COMMON, f"-I{ROOT / 'tests'}"]
        command += [f"-I{sass.FOLDER}", "-xc++", "-", "-o", f"{folder}/print"]
        text = "\n".join([*program, "}"])
        subprocess.run(command, input=text, text=True, check=True)
        printed = subprocess.run(
            [f"{folder}/print"], capture_output=True, text=True, check=True
        ).stdout
    sizes = (line.split(": ") for line in printed.splitlines())
    return {kernel: int(size) for kernel, size in sizes}


def faults(before: Kernels, now: Kernels, chip: str) -> list[str]:
    """What costs more than what is kept, and kernels that are on one side alone."""
    apart = [f"{kernel}: only in one of them" for kernel in before.keys() ^ now.keys()]
    return apart + [
        f"{kernel}: {'; '.join(more)}"
        for kernel in before.keys() & now.keys()
        if (more := growth(before[kernel], now[kernel], chip))
    ]


def growth(before: Slots, now: Slots, chip: str) -> list[str]:
    """What has grown too much, and whether fewer blocks fit on a multiprocessor."""
    # What a cubin tells has no dynamic shared memory.
    were, are = (blocks(replace(one, shared=before.shared), chip) for one in (before, now))
    fewer = [f"blocks {were} -> {are}"] if are < were else []
    return regressions(before, now) + fewer


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
                (one,) = (slots(*code) for code in codes_of(Path(file.name)).values())
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


def label_of(kernel: str) -> str:
    """`attention_forward<F32, 64, false>` -> attention_forward 64 in float32"""
    if kernel.startswith("triton"):
        return kernel
    name, (element, *widths) = arguments_of(kernel)
    label = f"{name} {'/'.join(width for width in widths if width.isdigit())}"
    return f"{label} in float32" if element == "F32" else label


def table(chip: str, kernels: Kernels) -> Iterator[str]:
    heads = "registers | shared, KiB | blocks | issue | tensor | FMA | ALU | MUFU | LSU | barriers"
    heads += " | between waits: median, most"
    heads += " | predicted clocks: tensor, issue, FMA, ALU, MUFU, shared | shared bytes a kFLOP"
    yield f"| kernel | {heads} | predicted bound |"
    yield "| --- |" + " --- |" * 14
    for kernel, one in kernels.items():
        if not has_loop(kernel):
            continue
        clocks = one.clocks(chip)
        cells = [one.registers, f"{one.shared / 1024:.0f}", blocks(one, chip)]
        cells += [one.issue, one.tensor, one.fma, one.alu]
        cells += [one.mufu, one.lsu, one.barriers]
        cells += [f"{one.between_waits:.0f}, {one.without_wait}"]
        order = ("tensor", "issue", "fma", "alu", "mufu", "shared")
        cells += [", ".join(f"{clocks[pipe]:.0f}" for pipe in order)]
        cells += [f"{1000 * one.shared_bytes / one.flops:.1f}"]
        pipe, share = one.bound(chip)
        # A step of attention has exponentials. Without any it is a loop of one of the products.
        bound = "only a part" if one.rolled or one.mufu == 0 else f"{pipe}: {share:.0%}"
        yield f"| {label_of(kernel)} | {' | '.join(map(str, cells))} | {bound} |"


def table_of_whole(chip: str, kernels: Kernels) -> Iterator[str]:
    heads = "registers | threads | shared, KiB | blocks"
    heads += " | instructions | tensor | FMA | ALU | MUFU | LSU | barriers"
    yield f"| kernel | {heads} |"
    yield "| --- |" + " --- |" * 11
    for kernel, one in kernels.items():
        if has_loop(kernel):
            continue
        at_launch = one.shared == 0 < one.shared_bytes
        cells = [one.registers, one.threads]
        cells += ["at launch" if at_launch else f"{one.shared / 1024:.0f}", blocks(one, chip)]
        cells += [one.issue, one.tensor, one.fma, one.alu, one.mufu, one.lsu, one.barriers]
        yield f"| `{kernel}` | {' | '.join(map(str, cells))} |"


def table_of_times() -> Iterator[str]:
    yield "| source | type | GPU | counted |"
    yield "| --- | --- | --- | --- |"
    for (source, element, arch), when in COUNTED.items():
        dtype = {"Bf16": "bfloat16", "F32": "float32"}[element]
        yield f"| `csrc/cuda/kernels/{source}.cu` | {dtype} | {CHIPS[arch]} | {when} |"


def beside_model(kernels: Kernels) -> Iterator[str]:
    """The clocks of a step of both consumers: counted, and by the model of docs/hopper.md."""
    model = runpy.run_path(str(ROOT / "docs/make_hopper_picture.py"))
    heads = "predicted for products: code, model | for exponentials: code, model | issue slots"
    yield f"| kernel | {heads} |"
    yield "| --- | --- | --- | --- |"
    for kernel, one in kernels.items():
        if "_hopper" not in kernel or not has_loop(kernel):
            continue
        name, (_, *widths, _) = arguments_of(kernel)
        q, v = map(int, widths)
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
            f"| {label_of(kernel)} | {code['tensor']:.0f}, {clocks['products']:.0f} "
            f"| {code['mufu']:.0f}, {clocks['exponentials']:.0f} | {code['issue']:.0f} |"
        )


INTRODUCTION = f"""# The machine code of the GPU kernels

**Every figure on this page is counted in the machine code or predicted from these counts. None is
measured.** The page is written by `python tests/support/machine_code.py --write` from the counts in
`tests/cuda/machine_code.json`. The tests that compile the kernels
(`tests/cuda/test_cuda_compile.py` for CUDA, `tests/triton/test_triton_aot.py` for Triton) fail if a
count grows by more than {MARGIN:.0%}, if a thread takes more than 8 more registers, if fewer blocks
fit on a multiprocessor, or if a kernel spills registers. With other versions of nvcc or Triton they
are skipped. At night they have these versions, and fail without them: `make test-complete COUNTS=1`
counts the kernels that compile within a minute, Triton's among them, and `make test-slow COUNTS=1`
the others. Kernels that are not in this table, such as those in float16, are compiled by the latter
and must not spill, but they are not counted.
"""


LOOPS = f"""## Loops

Each row is about the hottest loop of one kernel without options, in bfloat16 unless the row says
float32. It counts what one warp executes in one iteration, on the shortest path through the loop:
all keys are visible, and no barrier has to wait.

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
  In float32 a product takes four products of tf32 at half the rate, so each of their FLOP counts as
  two.
- **shared bytes a kFLOP**: the shared memory that the instructions read and write, without the
  copies of TMA and cp.async.
- **predicted bound**: the busiest pipe, and the share of the tensor cores' peak (in float32 of that
  in tf32) that it allows if all other work overlaps with it. The kernel cannot be faster. "Only a
  part" means that a matrix product is a loop of its own, which is not unrolled. Then either its
  body is counted once, as a part of the step, or it is the hottest loop itself. Such a row shows
  changes of the code, but it gives no bound.
"""


WHOLE = """## Whole kernels

The loops of these kernels have no path that is typical of a step. With options, the call decides at
run time what happens to each pair of a query and a key, and the shortest path leaves out most of
this work, in the backward pass even the exponentials. The other operators have loops inside loops
whose lengths depend on the call, and no tiles whose matrix products could be compared with a peak.
So these rows count every instruction of the kernel once, however often it runs. Such counts show
changes of the code, and predict no speed.

The names are those of the source, with the arguments of the template: the types of the elements,
the widths or the number of elements that are loaded at once, and whether a variant is on. For the
forward and backward pass of attention this variant is the one with options.

- **registers**, **shared**, **blocks**: as above. "At launch" means that host code chooses the size
  of the shared memory, for most kernels from the sizes of the call. Then it does not count in
  "blocks".
- **threads**: the most of a block.
"""


BESIDE = """The predicted clocks of one step of both consumer warpgroups, from the machine code and
from the model of [hopper.md](hopper.md). The kernels of dK and dV with more than 128 columns are
left out, because each of their consumers has a loop of its own.
"""


def page(found: dict[str, Kernels]) -> str:
    lines = [INTRODUCTION]
    lines += [*table_of_times(), "", LOOPS]
    for chip, kernels in found.items():
        lines += [f"### {chip}", "", *table(chip, kernels), ""]
    lines += [WHOLE]
    for chip, kernels in found.items():
        lines += [f"### All instructions, {chip}", "", *table_of_whole(chip, kernels), ""]
    lines += ["## Compared with the model of hopper.md", ""]
    lines += [BESIDE]
    lines += [*beside_model(found["sm_90"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def write() -> None:
    found: dict[str, Kernels] = {"sm_80": {}, "sm_90": {}}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "one.cubin"
        for name, element, arch in COUNTED:
            source = sass.FOLDER / f"{name}.cu"
            subprocess.run(
                compile_command(source, element, arch, cubin), capture_output=True, check=True
            )
            found[CHIPS[arch]] |= kernels_of(cubin)
    for chip, kernels in found.items():
        shared = shared_memory(kernels)
        ordered = sorted(kernels, key=_order)
        complete = {name: replace(kernels[name], shared=shared.get(name, 0)) for name in ordered}
        found[chip] = complete | triton_kernels(chip)
    document: dict[str, Any] = {
        "about": "counts of machine code, see docs/machine-code.md; nothing is measured",
        "versions": {"nvcc": version_of_nvcc(), "triton": version_of_triton()},
        "kernels": {c: {k: one.to_json() for k, one in x.items()} for c, x in found.items()},
    }
    COUNTS.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page(found))


def _order(kernel: str) -> tuple[int, str, list[tuple[int, str]]]:
    """The main kernels first, and numbers by their size."""
    name, arguments = arguments_of(kernel)
    place = MAIN.index(name) if has_loop(kernel) else len(MAIN)
    return place, name, [(int(x), "") if x.isdigit() else (0, x) for x in arguments]


if __name__ == "__main__":
    if sys.argv[1:] == ["--triton"]:
        before = kept()["kernels"]
        found = {
            chip: faults(
                {k: one for k, one in before[chip].items() if k.startswith("triton")},
                triton_kernels(chip),
                chip,
            )
            for chip in before
        }
        print(json.dumps(found))
    elif sys.argv[1:] == ["--write"]:
        write()
    else:
        raise SystemExit(__doc__)
