"""The CUDA kernels through the real compiler: no spills, and no more kernels than are documented.

Needs an nvcc; without one these say so. What the kernels compute is tested in test_cuda.py.
"""

from __future__ import annotations

import re
import runpy
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import issue_slots
import machine_code
import pytest
import sass
from required import REQUIRE_COUNTS, no_counts

ROOT = Path(__file__).resolve().parents[2]
NVCC = sass.find_tool("nvcc")

needs_nvcc = pytest.mark.skipif(NVCC is None and not REQUIRE_COUNTS, reason="there is no nvcc here")


def compiled(source: Path, element: str, arch: str, cubin: Path) -> dict[str, dict[str, int]]:
    """What ptxas says of every kernel: registers, and bytes of stack and spills."""
    command = machine_code.compile_command(source, element, arch, cubin)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # C7510 and others: it waits for each product of wgmma before it begins the next one.
    assert "(C75" not in done.stderr, re.findall(r"\(C75\d+\).*", done.stderr)
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


def check(source: Path, element: str, arch: str, folder: Path, count: int) -> Path:
    """Compiles a source and checks all but the counts of its `count` kernels."""
    cubin = folder / f"{source.stem}.{element}.{arch}.cubin"
    kernels = compiled(source, element, arch, cubin)
    assert len(kernels) == count, list(kernels)
    spilling = {
        name: report
        for name, report in kernels.items()
        if report["stack"] or report["stores"] or report["loads"]
    }
    assert not spilling
    if emulator.is_for_hopper(source):
        check_instructions(source, cubin)
    return cubin


# -- counts ----------------------------------------------------------------------------------------


def check_counts(cubin: Path, chip: str) -> None:
    """No kernel takes more instructions or registers than the counts that are kept."""
    if sass.find_tool("nvdisasm") is None or sass.find_tool("cuobjdump") is None:
        no_counts("there is no nvdisasm or no cuobjdump here")
    kept = machine_code.kept()
    if (version := machine_code.version_of_nvcc()) != kept["versions"]["nvcc"]:
        no_counts(f"those that are kept are of nvcc {kept['versions']['nvcc']}, this is {version}")
    now = machine_code.kernels_of(cubin)
    before = {name: one for name, one in kept["kernels"][chip].items() if name in now}
    assert not machine_code.faults(before, now, chip)


@pytest.mark.parametrize("required", [False, True])
def test_another_compiler_is_told_and_fails_where_counts_are_required(
    required: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_code, "version_of_nvcc", lambda: "1.0")
    monkeypatch.setattr(sass, "find_tool", lambda name: name)
    monkeypatch.setattr("required.REQUIRE_COUNTS", required)
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match=r"not counted: those .* of nvcc [\d.]+, this is 1.0"):
        check_counts(tmp_path / "none.cubin", "sm_80")


def test_the_page_on_machine_code_is_that_of_the_counts() -> None:
    kept = machine_code.kept()
    assert machine_code.page(kept["kernels"]) == machine_code.PAGE.read_text()
    kernels = [(name, one) for x in kept["kernels"].values() for name, one in x.items()]
    for name, one in kernels:
        assert one.threads > 0, name
        assert one.shared > 0 or not machine_code.has_loop(name), name
    of_nvcc = [(name, one) for name, one in kernels if not name.startswith("triton")]
    assert len(of_nvcc) == sum(sass.KERNELS[source] for source, _, _ in machine_code.COUNTED)
    shared = machine_code.shared_memory({name for name, _ in of_nvcc})
    for name, one in of_nvcc:
        assert one.shared == shared.get(name, 0), name


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="an sdist has no .github")
def test_the_nightly_workflow_requires_the_counts_that_the_page_promises() -> None:
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert '- run: make "$TARGET" COUNTS=1\n' in nightly
    assert "          - test-complete\n" in nightly
    assert "          - test-slow\n" in nightly


# A loop with a wait, a branch beside the way, and code that the loop is jumped out to.
LOOP = """
        .text._Z4loop:
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   HGMMA.64x80x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0040*/               @P1 BRA `(.L_x_3) ;
        /*0050*/                   FMNMX R4, R4, R5, !PT ;
        /*0060*/                   FMNMX R4, R4, R6, !PT ;
.L_x_3:
        /*0070*/                   FFMA R4, R4, R5, R6 ;
        /*0080*/                   MUFU.EX2 R4, R4 ;
        /*0090*/               @P2 BRA `(.L_x_5) ;
.L_x_4:
        /*00a0*/                   HGMMA.64x128x16.F32.BF16 R24, R20, gdesc[UR8], R24 ;
        /*00b0*/                   LDS.128 R4, [R2] ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   FADD R4, R4, R5 ;
        /*00f0*/                   BRA `(.L_x_4) ;
"""


def loop_of_128_threads() -> issue_slots.Slots:
    return replace(issue_slots.slots(sass.parsed(LOOP)["_Z4loop"], 100), threads=128)


def test_issue_slots_are_those_of_the_shortest_way_round() -> None:
    found = issue_slots.slots(sass.parsed(LOOP)["_Z4loop"], 100)
    # 64 x 80 x 16 and 64 x 128 x 16, of which a warp has a quarter.
    assert found.flops == 2 * 64 * (80 + 128) * 16 // 4
    assert (found.tensor, found.fma, found.mufu, found.alu) == (2, 1, 1, 0)
    assert (found.lsu, found.control, found.barriers, found.rolled) == (2, 4, 1, False)
    assert (found.between_waits, found.without_wait) == (found.issue - 1, found.issue - 1)
    # K and Q of 16 columns, V of 16 rows; and 16 bytes a lane.
    assert found.shared_bytes == (2 * 16 * (80 + 64) + 2 * 16 * 128) // 4 + 512
    assert found.clocks("sm_90")["tensor"] == (80 + 128) / 2
    assert found.bound("sm_90") == ("tensor", 1.0)


def test_instructions_between_waits_are_counted_round_the_loop() -> None:
    way = ["BAR.ARV", "BAR.SYNC", "FADD", "@P0 LDGDEPBAR", "DEPBAR.LE SB0", "FADD", "FADD", "FADD"]
    assert issue_slots.between_waits(way) == [2, 4]
    assert issue_slots.between_waits(["FADD", "BAR.ARV"]) == [2]
    # The same number of waits, one of them in the middle.
    before = loop_of_128_threads()
    assert machine_code.faults({"a": before}, {"a": replace(before, without_wait=4)}, "sm_90")


def test_kernels_with_options_are_counted_as_a_whole() -> None:
    code = sass.parsed(LOOP)["_Z4loop"]
    loop, wide, whole = (
        machine_code.slots_of(f"attention_forward<{arguments}>", code, 100)
        for arguments in ("Bf16, 64, false", "F32, 64, false", "Bf16, 64, true")
    )
    assert loop == issue_slots.slots(code, 100)
    assert wide == replace(loop, flops=2 * loop.flops)
    assert loop.issue < whole.issue == len(code.lines)
    assert whole.alu == loop.alu + 3  # a move and two maxima beside the way


def test_a_loop_of_products_within_the_way_is_told() -> None:
    rolled = LOOP.replace(
        "/*0070*/                   FFMA R4, R4, R5, R6", "/*0070*/ @P4 BRA `(.L_x_2)"
    )
    assert issue_slots.slots(sass.parsed(rolled)["_Z4loop"], 100).rolled


def test_counts_that_grow_are_refused() -> None:
    before = loop_of_128_threads()
    assert not machine_code.faults({"a": before}, {"a": before}, "sm_90")
    for change in ({"fma": before.fma + 4}, {"shared_bytes": before.shared_bytes * 2},
                   {"registers": 110}, {"mufu": before.mufu + 4}, {"flops": 0},
                   {"shared": 1}):  # fmt: skip
        assert machine_code.faults({"a": before}, {"a": replace(before, **change)}, "sm_90"), change
    # Twice the steps in one round cost twice as much.
    names = ("flops", "tensor", "fma", "alu", "mufu", "lsu", "control", "shared_bytes", "barriers")
    twice = replace(before, **{name: 2 * getattr(before, name) for name in names})
    assert not machine_code.faults({"a": before}, {"a": twice}, "sm_90")
    assert machine_code.faults({"a": before}, {}, "sm_90")
    # 128 threads with 168 registers fit three times, with 170 only twice.
    before = replace(before, registers=168)
    assert not machine_code.faults({"a": before}, {"a": replace(before, registers=167)}, "sm_90")
    assert machine_code.faults({"a": before}, {"a": replace(before, registers=170)}, "sm_90") == [
        "a: blocks 3 -> 2"
    ]


# -- Hopper ----------------------------------------------------------------------------------------


def constant(name: str) -> int:
    """An int of hopper/common.h."""
    found = re.search(rf"{name} = (\d+)", (sass.FOLDER / "hopper/common.h").read_text())
    assert found, name
    return int(found[1])


def check_instructions(source: Path, cubin: Path) -> None:
    """TMA, wgmma and setmaxnreg are there, registers beyond those taken, and spills, are not."""
    nvdisasm = sass.find_tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("there is no nvdisasm here")
    for name, code in sass.disassembled(cubin, nvdisasm).items():
        text = "\n".join(code.lines)
        for needed in ("HGMMA", "UTMALDG", "USETMAXREG.TRY_ALLOC", "USETMAXREG.DEALLOC"):
            assert needed in text, (name, needed)
        assert not re.search(r"\b(LDL|STL)\b", text), name
        consumer = code.reachable(code.find("USETMAXREG.TRY_ALLOC"))
        producer = code.reachable(code.find("USETMAXREG.DEALLOC"))
        for lines, registers in (
            (consumer, "kConsumerRegisters"),
            (producer, "kProducerRegisters"),
        ):
            assert sass.highest_register(lines) < constant(registers), (name, registers)
        if source.stem == "sdpa_forward":
            check_overlap(name, consumer)
        elif "_kv_" in name:
            check_weights_beside_product(name, consumer)


def events(lines: list[str]) -> str:
    """One letter an instruction: Q, P a product Q K^T, P V; e an exponential; 0, 1 a wait that
    leaves so many groups of products."""
    kinds = {
        r"HGMMA\S* R\d+, gdesc": "Q",
        r"HGMMA\S* R\d+, R\d+": "P",
        r"MUFU\.EX2": "e",
        r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0": "0",
        r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1": "1",
    }
    return "".join(
        letter for line in lines for kind, letter in kinds.items() if re.search(kind, line)
    )


def check_overlap(name: str, lines: list[str]) -> None:
    """Are the next Q K^T and the last P V computed beside the exponentials of this step?

    Then between the products of Q K^T and those of P V nothing is waited for before nearly all
    exponentials, and then the last P V alone.
    """
    found = re.search(r"Li(\d+)ELi(\d+)ELb([01])", name)
    assert found, name
    value_width, general = int(found[2]), found[3] == "1"
    happened = events(lines)
    scores = re.findall(r"(?<=Q)[e01]+(?=P)", happened)
    assert scores, name
    if general or value_width == 256:  # one product after the other
        assert all(re.fullmatch("0e+", gap) for gap in scores), (name, scores)
        return
    # Two steps of the loop, and one after it.
    assert len(scores) == 3, (name, scores)
    for gap in scores:
        before, *rest = re.split("[01]", gap)
        assert re.fullmatch("e+1e*", gap), (name, gap)
        assert len(before) > 9 * sum(map(len, rest)), (name, gap)
    # And two last steps, whose Q K^T has been waited for.
    last = re.findall(r"(?<=P)1?(e+)0(e*)(?=P)", happened)
    assert len(last) == 2, (name, happened)
    assert all(len(before) > 9 * len(after) for before, after in last), (name, last)


def check_weights_beside_product(name: str, lines: list[str]) -> None:
    """Without options: is dP^T = V dO^T computed beside most exponentials of P^T?

    A step waits for K Q^T alone before them, in code for the edge of the window and code for the
    rest. (A consumer that sums dV alone has no dP.)
    """
    found = re.search(r"Li(\d+)ELi(\d+)ELb([01])", name)
    assert found, name
    steps = re.findall(r"(?<=Q)[e01]+(?=P)", events(lines))
    assert len(steps) == (1 if int(found[1]) <= 128 else 2), (name, steps)
    if found[3] == "1":
        assert not any("1" in step for step in steps), (name, steps)
        return
    waits = re.fullmatch(r"1(e+)0(e+)1(e+)0(e+)", steps[0])
    assert waits, (name, steps)
    before_edge, after_edge, before, after = map(len, waits.groups())
    assert before_edge > after_edge, (name, steps)
    assert before > 2 * after, (name, steps)


def test_every_source_has_a_documented_count() -> None:
    assert sorted(map(sass.name_of, sass.SOURCES)) == sorted(sass.KERNELS)
    page = (ROOT / "docs/cuda-kernels.md").read_text()
    everywhere, for_hopper = sass.documented()
    assert f"{everywhere} an architecture" in page
    assert f"{for_hopper} for Hopper alone" in page


@pytest.mark.slow
def test_the_module_needs_no_header_of_cuda() -> None:
    """setup.py gives these to the C++ compiler alone."""
    command = [*emulator.compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Werror"]
    command += [*emulator._python_flags(), '-DFASTATTN_CUDA_ARCHS="80;90a"', "-DFASTATTN_HOPPER"]
    command += map(str, sorted((ROOT / "csrc/cuda").glob("*.cpp")))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_page_on_hopper_has_the_numbers_of_the_source() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_hopper_picture.py"))
    page = (ROOT / "docs/hopper.md").read_text()
    for table in "\n".join(made["tables"]()).split("\n\n"):
        assert table in page


def counted(when: str) -> list[Any]:
    return [
        pytest.param(*which, id="-".join(which))
        for which, then in machine_code.COUNTED.items()
        if then == when
    ]


@pytest.mark.complete
@needs_nvcc
@pytest.mark.parametrize(("name", "element", "arch"), counted(machine_code.EACH))
def test_kernels_neither_spill_nor_cost_more(
    name: str, element: str, arch: str, tmp_path: Path
) -> None:
    source = sass.FOLDER / f"{name}.cu"
    cubin = check(source, element, arch, tmp_path, sass.KERNELS[name])
    check_counts(cubin, machine_code.CHIPS[arch])


@pytest.mark.complete
@needs_nvcc
def test_backward_kernels_for_hopper_neither_spill_nor_cost_more(tmp_path: Path) -> None:
    """Those without options: the others take most of the time to compile."""
    kernels = [
        name
        for name in machine_code.kept()["kernels"]["sm_90"]
        if name.startswith("attention_backward") and machine_code.has_loop(name)
    ]
    source = tmp_path / "hopper/sdpa_backward.cu"
    source.parent.mkdir()
    lines = [f'#include "{sass.FOLDER}/hopper/sdpa_backward_{of}.h"' for of in ("q", "kv")]
    lines += ["namespace fastattn::cuda {"]
    for name in kernels:
        kernel = name.replace("<", "_kernel<")
        lines += [f"template __global__ void {kernel}(const __grid_constant__ HopperArguments);"]
    source.write_text("\n".join([*lines, "}\n"]))
    check_counts(check(source, "Bf16", "90a", tmp_path, len(kernels)), "sm_90")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "element", "arch"),
    [
        pytest.param(source, element, arch, id=f"{sass.name_of(source)}-{element}-{arch}")
        for source in sass.SOURCES
        for element in emulator.elements(source)
        for arch in (["90a"] if emulator.is_for_hopper(source) else ["80", "90"])
    ],
)
def test_no_kernel_spills(source: Path, element: str, arch: str, tmp_path: Path) -> None:
    name = sass.name_of(source)
    cubin = check(source, element, arch, tmp_path, sass.KERNELS[name])
    if (name, element, arch) in machine_code.COUNTED:  # last, because it may skip
        check_counts(cubin, machine_code.CHIPS[arch])


@needs_nvcc
@pytest.mark.slow
def test_the_wrappers_assemble(tmp_path: Path) -> None:
    """Every instruction of csrc/cuda/ptx, by the kernels of the conformance tests."""
    for arch in ("80", "90a"):
        command = emulator.conformance_command(arch, tmp_path / f"{arch}.cubin", "-cubin")
        command[0] = str(NVCC)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
