"""How `fastattn._cpu` is built.

csrc/cpu/kernels/*.cpp are compiled once per instruction set, csrc/cpu/kernels/tiles/*.cpp for AMX
and for its emulation, csrc/cpu/peaks/*.cpp each for its unit, and csrc/cpu/*.cpp once for the
baseline. Sources that include pybind11 are compiled together, as bindings_of_*.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from plans.compilers import (
    PYTHON,
    ROOT,
    CannotBuild,
    Plan,
    enabled,
    features,
    find_compiler,
    refusal,
    words,
)


@dataclass(frozen=True)
class InstructionSets:
    """The instruction sets of one architecture, with the compiler's flags, by name."""

    # Weakest first. Kernels are compiled for all of them, everything else for the first.
    isas: dict[str, list[str]]
    # Instruction sets that add products of bf16 pairs to another one, by name. Only the kernels
    # with such products (WITH_PAIRS) are compiled for them, in bf16; all other kernels come from
    # the instruction set that they extend.
    extends: dict[str, str] = field(default_factory=dict)
    # Only attention in bf16, fp16 and float32 runs on tiles; all else runs on the vectors below.
    tiles: dict[str, list[str]] = field(default_factory=dict)
    # Flags that emulate the strongest vectors, and tiles, in plain C++: for tests.
    emulated_vectors: dict[str, list[str]] = field(default_factory=dict)
    emulated_tiles: dict[str, list[str]] = field(default_factory=dict)
    # Units of which only the peak is measured, csrc/cpu/peaks/<name>.cpp; skipped if it does not
    # compile.
    peaks: dict[str, list[str]] = field(default_factory=dict)


X86_ISAS = {
    "baseline": ["-march=x86-64"],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512_bf16": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16"],
}
X86 = InstructionSets(
    X86_ISAS,
    extends={"avx512_bf16": "avx512"},
    tiles={"amx_bf16": [*X86_ISAS["avx512"], "-mamx-tile", "-mamx-bf16"]},
    # -O2 compiles much longer. Without vectors emulated tiles are slow, and without
    # -fexpensive-optimizations GCC fuses no multiplications and additions, as the bounds expect.
    emulated_vectors={
        "avx512_bf16_emulated": [
            *X86_ISAS["avx2"],
            *(
                "-DFASTATTN_EMULATED_AVX512=1",
                "-O1",
                "-ftree-vectorize",
                "-fexpensive-optimizations",
            ),
        ]
    },
    emulated_tiles={"amx_bf16_emulated": ["-DFASTATTN_EMULATED_TILES=1"]},
    peaks={
        "amx": ["-march=x86-64", "-mamx-tile", "-mamx-bf16"],
        "avx512_fp16": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512fp16"],
    },
)
# Vectors of 128 bits are part of the architecture, products of bf16 pairs came later.
ARM = InstructionSets(
    {"baseline": [], "armv8_6": ["-march=armv8.6-a"]}, extends={"armv8_6": "baseline"}
)
OTHERS = InstructionSets({"baseline": []})
# On a Xeon with AMX, bf16 is faster on avx512 than on avx512_bf16 (docs/performance.md), so avx512
# comes first here.
BELOW_TILES = ("avx512", "avx512_bf16")
# The sources of csrc/cpu/kernels with products of bf16 pairs, and the table of kernels.
WITH_PAIRS = ("sdpa_forward", "sdpa_backward", "linear", "peak", "table")

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wall", "-Wextra"]
# No function that is not inlined takes or returns vectors wider than the baseline's registers.
COMMON_FLAGS += ["-Wno-psabi"]
# Not -ffast-math, because attention needs NaN and infinity. These flags only give up errno, the
# floating-point exception flags, and the separate rounding of products.
COMMON_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

# Functions begin at a cache line: otherwise the speed of a kernel depends on its place in the
# module, which changes with every other source.
RELEASE = ["-O2", "-falign-functions=64"]

EXPORTS = [f"-Wl,--version-script={ROOT / 'csrc/exports.map'}"]

SANITIZERS = ("address", "undefined", "thread")
OPENMP_PROBE = "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"


def optimisation_flags() -> tuple[list[str], list[str]]:
    """The compiler's and the linker's flags that FASTATTN_DEBUG and FASTATTN_SANITIZE choose."""
    sanitizers = os.environ.get("FASTATTN_SANITIZE", "")
    if not sanitizers and not enabled("FASTATTN_DEBUG"):
        # -O3 compiles longer and makes nothing faster: the kernels are written with vectors
        # and unrolled loops.
        return RELEASE, []
    debug = ["-g", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    if not sanitizers:
        return ["-O1", *debug], []
    for name in sanitizers.split(","):
        if name not in SANITIZERS:
            raise CannotBuild(
                f"FASTATTN_SANITIZE has {name!r}; allowed are {', '.join(SANITIZERS)}"
            )
    sanitize = [f"-fsanitize={sanitizers}"]
    # The vptr check needs type information, which hidden visibility removes from libraries. -O2
    # gives the rounding of a release, because the same tests check the errors.
    compile_flags = ["-O2", *debug, *sanitize, "-fno-sanitize=vptr"]
    return [*compile_flags, "-fno-sanitize-recover=undefined"], sanitize


def instruction_sets(compiler: list[str]) -> InstructionSets:
    """Return the instruction sets of the compiler's target, which may be another machine."""
    defined = features(compiler, [])
    if "#define __x86_64__ 1" in defined:
        return X86
    return ARM if "#define __aarch64__ 1" in defined else OTHERS


def runs_here(compiler: list[str], isa_flags: list[str]) -> bool:
    """Whether the compiler says that this machine's processor has all of an instruction set."""
    baseline = instruction_sets(compiler).isas["baseline"]
    added = features(compiler, isa_flags) - features(compiler, baseline)
    return bool(added) and added <= features(compiler, ["-march=native"])


def strongest_here(compiler: list[str], isas: dict[str, list[str]]) -> str:
    """The last of the instruction sets that this machine's processor has."""
    return [i for i, flags in isas.items() if i == "baseline" or runs_here(compiler, flags)][-1]


def usable_isas(
    compiler: list[str], flags: list[str], sets: InstructionSets
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The instruction sets to build, and the reasons why the others are left out."""
    usable, left_out = {}, {}
    requested = os.environ.get("FASTATTN_CPU_ISAS", "all")
    if requested not in ("all", "native"):
        raise CannotBuild(f"FASTATTN_CPU_ISAS must be 'all' or 'native', got {requested!r}")
    native = requested == "native"
    strongest = strongest_here(compiler, sets.isas)
    wanted = ["baseline", strongest, sets.extends.get(strongest)] if native else list(sets.isas)
    for isa, isa_flags in sets.isas.items():
        if isa not in wanted:
            left_out[isa] = "not requested (FASTATTN_CPU_ISAS=native)"
            continue
        error = refusal(compiler, [*flags, *isa_flags], "int zero() { return 0; }\n")
        if error is None:
            usable[isa] = isa_flags
        else:
            left_out[isa] = f"{compiler[-1]} rejects {' '.join(isa_flags)}: {error}"
    if "baseline" in left_out:
        raise CannotBuild(left_out["baseline"])
    return usable, left_out


def usable_tiles(
    compiler: list[str], flags: list[str], isas: dict[str, list[str]], sets: InstructionSets
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The instruction sets with tiles, and why others are left out."""
    below = [isa for isa in BELOW_TILES if isa in isas]
    if not below:
        return {}, dict.fromkeys(sets.tiles, f"it needs {' or '.join(BELOW_TILES)}")
    usable, left_out = {}, {}
    for isa, isa_flags in sets.tiles.items():
        # The assembler must know them too: they are inline assembly.
        tiles = 'void multiply() { asm volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }\n'
        error = refusal(compiler, [*flags, *isa_flags], tiles)
        if error is not None:
            left_out[isa] = f"{compiler[-1]} rejects {' '.join(isa_flags)}: {error}"
        elif os.environ.get("FASTATTN_CPU_ISAS") == "native" and not runs_here(compiler, isa_flags):
            left_out[isa] = "not requested (FASTATTN_CPU_ISAS=native)"
        else:
            usable[isa] = [*isa_flags, f"-DFASTATTN_BASE={below[0]}"]
    return usable, left_out


@dataclass
class Emulated:
    """Emulations of the instruction sets that this machine lacks, and the needs of their tiles."""

    vectors: dict[str, list[str]] = field(default_factory=dict)
    extends: dict[str, str] = field(default_factory=dict)
    tiles: dict[str, list[str]] = field(default_factory=dict)
    needs: str = ""  # the instruction set of this machine that runs the emulated tiles


def emulated_here(
    compiler: list[str], flags: list[str], isas: dict[str, list[str]], sets: InstructionSets
) -> Emulated:
    """The emulations with which tests run every kernel on this machine.

    Emulated tiles run on real vectors if possible, because these are faster.

    Emulated vectors compile slowly, so FASTATTN_CPU_EMULATED=1 has a sample of their kernels: those
    with products of bf16 pairs, in bf16. `all` has every kernel in every dtype.
    """
    if not enabled("FASTATTN_CPU_EMULATED"):
        return Emulated()
    real = [isa for isa in BELOW_TILES if isa in isas and runs_here(compiler, isas[isa])]
    vectors = {
        isa: isa_flags
        for isa, isa_flags in sets.emulated_vectors.items()
        if isa.removesuffix("_emulated") not in real
        and refusal(compiler, [*flags, *isa_flags], "int zero() { return 0; }\n") is None
    }
    if not real and not vectors:
        return Emulated()
    complete = os.environ["FASTATTN_CPU_EMULATED"] == "all"
    extends = {} if complete else dict.fromkeys(vectors, strongest_here(compiler, isas))
    widest = real[0] if real else next(iter(vectors))
    base = extends.get(widest, widest)
    on_base = [*(isas | vectors)[widest], f"-DFASTATTN_BASE={base}"]
    tiles = {isa: [*on_base, *its] for isa, its in sets.emulated_tiles.items()}
    return Emulated(vectors, extends, tiles, base if real else "avx2")


def usable_peaks(
    compiler: list[str], flags: list[str], units: dict[str, list[str]]
) -> tuple[list[tuple[Path, list[str]]], dict[str, str]]:
    """The sources of csrc/cpu/peaks with their flags, and why the others are left out."""
    usable, left_out = [], {}
    for name, unit_flags in units.items():
        source = ROOT / "csrc/cpu/peaks" / f"{name}.cpp"
        if not source.exists():
            continue
        include = f"-I{source.parent}"
        error = refusal(compiler, [*flags, *unit_flags, include], source.read_text())
        if error is None:
            usable.append((source, [*flags, *unit_flags]))
        else:
            left_out[f"peak of {name}"] = f"{compiler[-1]} cannot compile it: {error}"
    return usable, left_out


def plan() -> Plan:
    """Kernels are compiled per instruction set, the rest once; isa.cpp gets the list of sets."""
    if sys.platform != "linux":
        raise CannotBuild(f"the native core is built on Linux only; this is {sys.platform}")
    import pybind11

    compiler = find_compiler()
    optimise, link_flags = optimisation_flags()
    flags = [*words("CXXFLAGS"), *COMMON_FLAGS, *optimise]
    if error := refusal(compiler, flags, OPENMP_PROBE):
        raise CannotBuild(f"{compiler[-1]} cannot compile C++17 with OpenMP: {error}")
    sets = instruction_sets(compiler)
    isas, left_out = usable_isas(compiler, flags, sets)

    objects = []
    emulated = emulated_here(compiler, flags, isas, sets)
    for source in sorted((ROOT / "csrc/cpu/kernels").glob("*.cpp")):
        for isa, isa_flags in (isas | emulated.vectors).items():
            one_isa = [*flags, *isa_flags, f"-DFASTATTN_ISA={isa}"]
            if base := (sets.extends | emulated.extends).get(isa):
                if source.stem not in WITH_PAIRS:
                    continue
                one_isa += [f"-DFASTATTN_EXTENDS={base}", "-DFASTATTN_ONLY_DTYPE=bf16"]
            objects.append((source, f"{source.stem}.{isa}.o", one_isa))
    on_tiles = sorted((ROOT / "csrc/cpu/kernels/tiles").glob("*.cpp"))
    tiles, tiles_left_out = usable_tiles(compiler, flags, isas, sets) if on_tiles else ({}, {})
    for source in on_tiles:
        for isa, isa_flags in (tiles | emulated.tiles).items():
            one_isa = [*flags, *isa_flags, f"-DFASTATTN_ISA={isa}"]
            objects.append((source, f"tiles/{source.stem}.{isa}.o", one_isa))
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    shared = [*flags, *isas["baseline"], *(f"-isystem{path}" for path in includes)]
    if optimise == RELEASE:
        # Assertions have the paths of Python's and pybind11's headers, which differ from build to
        # build. The messages about wrong arguments stay.
        shared += ["-DNDEBUG", "-DPYBIND11_DETAILED_ERROR_MESSAGES"]
    peaks, peaks_left_out = usable_peaks(compiler, flags, sets.peaks)
    objects += [(source, f"unit.{source.stem}.o", unit_flags) for source, unit_flags in peaks]
    compiled = [*isas, *tiles, *emulated.vectors, *emulated.tiles]
    definitions = {
        "isa": [
            *(f"-DFASTATTN_HAVE_{isa.upper()}=1" for isa in compiled),
            f"-DFASTATTN_EMULATED_TILES_NEED=why_no_{emulated.needs}",
        ],
        "peak_units": [f"-DFASTATTN_HAVE_PEAK_{source.stem.upper()}=1" for source, _ in peaks],
    }
    for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        if source.stem.startswith("bind_") or source.stem == "module":
            continue  # part of the bindings_of_*.cpp
        one = [*shared, *definitions.get(source.stem, [])]
        objects.append((source, f"{PYTHON}/{source.stem}.o", one))

    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    record = {
        "compiler": version.stdout.splitlines()[0],
        "flags": " ".join(flags),
        "isas": {isa: " ".join(isa_flags) for isa, isa_flags in (isas | tiles).items()},
        "left_out": left_out | tiles_left_out | peaks_left_out,
    }
    return Plan(compiler, objects, [*words("LDFLAGS"), *EXPORTS, "-fopenmp", *link_flags], record)
