"""Builds the native modules, C++ with pybind11 and without torch, by ninja.

`fastattn._cpu` consists of csrc/cpu/kernels/*.cpp, compiled once per instruction set,
csrc/cpu/kernels/tiles/*.cpp, compiled for AMX and for its emulation, csrc/cpu/peaks/*.cpp, each
compiled for its unit, and csrc/cpu/*.cpp, compiled once for the baseline. `fastattn._cuda`, which
needs nvcc, consists of csrc/cuda/kernels/**/*.cu, compiled once per element type, and
csrc/cuda/*.cpp. The library also runs without a module that cannot be built.
`fastattn/_build.json` records what was built, how, and why anything was not; `fastattn info` shows
it.

Environment:
  FASTATTN_NATIVE=0           build no native module
  FASTATTN_REQUIRE_NATIVE=1   a module that cannot be built is an error; a missing nvcc is not
  FASTATTN_CPU_ISAS=native    compile only for the strongest instruction set of this machine, the
                              baseline, and the tiles of AMX: half the build time, for use on this
                              machine only
  FASTATTN_CPU_EMULATED=0     leave out the emulated instruction sets, which tests run where the
                              processor lacks the real ones; for packages
  FASTATTN_CUDA=0             do not build _cuda, even if there is an nvcc
  FASTATTN_CUDA_ARCHS=LIST    the architectures of _cuda, by default 80;90a; other GPUs from 8.0 on
                              run the PTX of the lowest one
  NVCC                        the CUDA compiler; default: nvcc in PATH or CUDA_HOME
  FASTATTN_DEBUG=1            -O1 -g, with library assertions
  FASTATTN_SANITIZE=LIST      address, undefined, thread; comma-separated
  MAX_JOBS=N                  run at most N compilers at a time
  CXX, CXXFLAGS, LDFLAGS      as usual; the flags below follow CXXFLAGS and override it. A cross
                              compiler builds the instruction sets of its own target
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
RECORD = "fastattn/_build.json"


@dataclass(frozen=True)
class InstructionSets:
    """What is compiled for one architecture: the flags of each instruction set, by name."""

    # Weakest first. Kernels are compiled for all of them, everything else for the first.
    isas: dict[str, list[str]]
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
    tiles={"amx_bf16": [*X86_ISAS["avx512"], "-mamx-tile", "-mamx-bf16"]},
    # -O2 compiles three times as long. Without vectors emulated tiles are slow, and without
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
ARM = InstructionSets({"baseline": [], "armv8_6": ["-march=armv8.6-a"]})
OTHERS = InstructionSets({"baseline": []})
# On a Xeon with AMX the kernels of avx512 are faster in bf16 than those of avx512_bf16
# (docs/evidence.md), so they come first here.
BELOW_TILES = ("avx512", "avx512_bf16")

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wall", "-Wextra"]
# No function that is not inlined takes or returns vectors wider than the baseline's registers.
COMMON_FLAGS += ["-Wno-psabi"]
# Not -ffast-math, because attention needs NaN and infinity. These flags only give up errno, the
# floating-point exception flags, and the separate rounding of products.
COMMON_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

EXPORTS = [f"-Wl,--version-script={ROOT / 'csrc/exports.map'}"]

SANITIZERS = ("address", "undefined", "thread")
# Only the objects that include Python's headers differ between Pythons; the others are shared.
PYTHON = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
OPENMP_PROBE = "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"


class CannotBuild(Exception):
    """The reason why a native module cannot be built, as one sentence."""


class NotWanted(CannotBuild):
    """The module is left out by design; reported only on request."""


@dataclass
class Plan:
    """How to build one shared library."""

    compiler: list[str]  # compiles C++ sources and links the library
    objects: list[tuple[Path, str, list[str]]]  # source, object, flags
    link_flags: list[str]
    record: dict[str, Any]  # the entry of the build record
    nvcc: str = "nvcc"  # compiles .cu sources


def enabled(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def words(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def find_compiler() -> list[str]:
    """The C++ compiler as a command; $CXX may contain a wrapper, such as `ccache g++`."""
    if command := words("CXX"):
        if shutil.which(command[0]) is None:
            raise CannotBuild(f"the compiler that CXX names, {command[0]!r}, was not found")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler was found (looked for $CXX, g++, c++ and clang++)")


def first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines[-1:] or ["it gave no message"])[0]


def refusal(compiler: list[str], flags: list[str], source: str) -> str | None:
    """None if the compiler can make a shared library of `source`, else its first error."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.cpp").write_text(source)
        command = [*compiler, *flags, "-shared", "probe.cpp", "-o", "probe.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else first_error(done.stderr)


def optimisation_flags() -> tuple[list[str], list[str]]:
    """The compiler's and the linker's flags that FASTATTN_DEBUG and FASTATTN_SANITIZE choose."""
    sanitizers = os.environ.get("FASTATTN_SANITIZE", "")
    if not sanitizers and not enabled("FASTATTN_DEBUG"):
        # -O3 compiles 50 % longer and makes nothing faster: the kernels are written with vectors
        # and unrolled loops.
        return ["-O2"], []
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


def features(compiler: list[str], flags: list[str]) -> set[str]:
    """What the compiler defines under these flags; nothing if it rejects them."""
    command = [*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())


def instruction_sets(compiler: list[str]) -> InstructionSets:
    """Those of the architecture that the compiler compiles for; it need not be this machine's."""
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
    compiler: list[str], flags: list[str], isas: dict[str, list[str]]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The instruction sets to build, and the reasons why the others are left out."""
    usable, left_out = {}, {}
    requested = os.environ.get("FASTATTN_CPU_ISAS", "all")
    if requested not in ("all", "native"):
        raise CannotBuild(f"FASTATTN_CPU_ISAS must be 'all' or 'native', got {requested!r}")
    native = requested == "native"
    wanted = ["baseline", strongest_here(compiler, isas)] if native else list(isas)
    for isa, isa_flags in isas.items():
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
    """Stand-ins for the instruction sets that this machine lacks, and what their tiles need."""

    vectors: dict[str, list[str]] = field(default_factory=dict)
    tiles: dict[str, list[str]] = field(default_factory=dict)
    needs: str = ""  # the instruction set of this machine that runs the emulated tiles


def emulated_here(
    compiler: list[str], flags: list[str], isas: dict[str, list[str]], sets: InstructionSets
) -> Emulated:
    """What tests need to run every kernel on this machine. Emulated tiles take real vectors where
    there are any, because they are faster."""
    if os.environ.get("FASTATTN_CPU_EMULATED", "1") in ("", "0"):
        return Emulated()
    real = [isa for isa in BELOW_TILES if isa in isas and runs_here(compiler, isas[isa])]
    vectors = {
        isa: isa_flags
        for isa, isa_flags in sets.emulated_vectors.items()
        if isa.removesuffix("_emulated") not in real
        and refusal(compiler, [*flags, *isa_flags], "int zero() { return 0; }\n") is None
    }
    below = [*real, *vectors]
    if not below:
        return Emulated()
    base = below[0]
    on_base = [*(isas | vectors)[base], f"-DFASTATTN_BASE={base}"]
    tiles = {isa: [*on_base, *its] for isa, its in sets.emulated_tiles.items()}
    return Emulated(vectors, tiles, base if real else "avx2")


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


def plan_cpu() -> Plan:
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
    isas, left_out = usable_isas(compiler, flags, sets.isas)

    objects = []
    emulated = emulated_here(compiler, flags, isas, sets)
    for source in sorted((ROOT / "csrc/cpu/kernels").glob("*.cpp")):
        for isa, isa_flags in (isas | emulated.vectors).items():
            one_isa = [*flags, *isa_flags, f"-DFASTATTN_ISA={isa}"]
            objects.append((source, f"{source.stem}.{isa}.o", one_isa))
    on_tiles = sorted((ROOT / "csrc/cpu/kernels/tiles").glob("*.cpp"))
    tiles, tiles_left_out = usable_tiles(compiler, flags, isas, sets) if on_tiles else ({}, {})
    for source in on_tiles:
        for isa, isa_flags in (tiles | emulated.tiles).items():
            one_isa = [*flags, *isa_flags, f"-DFASTATTN_ISA={isa}"]
            objects.append((source, f"tiles/{source.stem}.{isa}.o", one_isa))
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    shared = [*flags, *isas["baseline"], *(f"-isystem{path}" for path in includes)]
    if optimise == ["-O2"]:
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


def is_for_hopper(source: Path) -> bool:
    return source.parent.name == "hopper"


def cuda_elements(source: Path) -> tuple[str, ...]:
    """The element types that kernels are compiled for; only attention has tf32 besides float32."""
    if is_for_hopper(source):
        return ("Bf16", "F16")
    return ("Bf16", "F16", "F32", *(["Tf32"] if source.stem.startswith("sdpa") else []))


CUDA_ARCHS = "80;90a"
HOPPER_ARCH = "-gencode=arch=compute_90a,code=sm_90a"


def find_nvcc() -> str:
    if os.environ.get("FASTATTN_CUDA") == "0":
        raise NotWanted("FASTATTN_CUDA=0 was set at installation")
    if name := os.environ.get("NVCC"):
        if found := shutil.which(name):
            return found
        raise CannotBuild(f"the compiler that NVCC names, {name!r}, was not found")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if found := shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc"):
        return found
    raise NotWanted("no CUDA compiler was found (looked for $NVCC, nvcc and $CUDA_HOME/bin/nvcc)")


def cuda_toolkit(nvcc: str) -> Path:
    """The folder of CUDA's static runtime library."""
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    top = [line.partition("TOP=")[2] for line in dry_run.stderr.splitlines() if "TOP=" in line]
    for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
        if top and Path(top[0], folder, "libcudart_static.a").exists():
            return Path(top[0], folder).resolve()
    raise CannotBuild(f"{nvcc} has no libcudart_static.a in its toolkit")


def architecture_flags(archs: str) -> list[str]:
    """Machine code for each architecture, from the PTX of the lowest one, which is included.

    The kernels need no features beyond the lowest architecture, and generating PTX takes as long as
    assembling it.
    """
    if not re.fullmatch(r"\d+[af]?(;\d+[af]?)*", archs):
        raise CannotBuild(f"FASTATTN_CUDA_ARCHS is {archs!r}, not a list such as {CUDA_ARCHS}")
    numbers = sorted({int(arch.rstrip("af")) for arch in archs.split(";")})
    ptx = f"compute_{numbers[0]}"
    codes = ",".join([ptx, *(f"sm_{number}" for number in numbers)])
    return [f"-gencode=arch={ptx},code=[{codes}]"]


def plan_cuda() -> Plan:
    """nvcc compiles kernels per element type, the C++ compiler the rest. Needs no driver."""
    nvcc = find_nvcc()
    if sys.platform != "linux":
        raise CannotBuild(f"the CUDA core is built on Linux only; this is {sys.platform}")
    import pybind11

    compiler = find_compiler()
    runtime = cuda_toolkit(nvcc)
    archs = os.environ.get("FASTATTN_CUDA_ARCHS", CUDA_ARCHS)
    common = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    flags = [*common, *architecture_flags(archs)]
    hopper = "90a" in archs.split(";")  # the only architecture of the kernels for Hopper
    objects = []
    kernels = ROOT / "csrc/cuda/kernels"
    for source in sorted(kernels.rglob("*.cu")):
        if is_for_hopper(source) and not hopper:
            continue
        chosen = [*common, HOPPER_ARCH] if is_for_hopper(source) else flags
        # With the folder, because an operator has the same file name in each.
        name = source.relative_to(kernels).with_suffix("")
        for element in cuda_elements(source):
            one_element = [*chosen, f"-DFASTATTN_ELEMENT={element}"]
            objects.append((source, f"{name}.{element}.o", one_element))
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    host = [*words("CXXFLAGS"), "-std=c++17", "-fPIC", "-fvisibility=hidden", "-O2", "-Wall"]
    host += [*(f"-isystem{path}" for path in includes), f'-DFASTATTN_CUDA_ARCHS="{archs}"']
    version = runpy.run_path(str(ROOT / "fastattn/_version.py"))["__version__"]
    host += [f'-DFASTATTN_VERSION="{version}"']
    host += ["-DFASTATTN_HOPPER"] if hopper else []
    bindings = sorted((ROOT / "csrc/cuda").glob("*.cpp"))
    objects += [(source, f"{PYTHON}/{source.stem}.o", host) for source in bindings]
    # The static runtime loads the driver at its first use, so the module imports without a driver.
    link = [*words("LDFLAGS"), f"-L{runtime}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    tools = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    record = {
        "compiler": tools.stdout.strip().splitlines()[-2].strip(),
        "flags": " ".join(flags),
        "architectures": archs,
        "left_out": {},
    }
    return Plan(compiler, objects, [*link, "-Wl,--exclude-libs,ALL"], record, nvcc)


# Each is planned, built and recorded separately, so a broken nvcc does not affect the CPU kernels.
PLANS: dict[str, Callable[[], Plan]] = {"cpu": plan_cpu, "cuda": plan_cuda}


def ninja_file(plan: Plan, output: Path) -> str:
    def quoted(*arguments: str) -> str:
        return shlex.join(arguments).replace("$", "$$")

    def path(name: Path | str) -> str:
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    compiler = quoted(*plan.compiler)
    lines = [
        "rule compile",
        f"  command = {compiler} -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule compile_cuda",
        f"  command = {quoted(plan.nvcc)} -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = {compiler} -shared $in -o $out $flags",
        "  description = link $out",
    ]
    for source, name, flags in plan.objects:
        rule = "compile_cuda" if source.suffix == ".cu" else "compile"
        lines += [f"build {path(name)}: {rule} {path(source)}", f"  flags = {quoted(*flags)}"]
    names = " ".join(path(name) for _, name, _ in plan.objects)
    lines += [f"build {path(output)}: link {names}", f"  flags = {quoted(*plan.link_flags)}", ""]
    return "\n".join(lines)


def run_ninja(folder: Path) -> None:
    import ninja

    command = [str(Path(ninja.BIN_DIR, "ninja")), "-C", str(folder)]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    output = ""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            output += line
    if process.returncode != 0:
        raise CannotBuild(f"the compiler failed: {first_error(output)}")


class BuildNative(build_ext):
    """Builds each module of PLANS separately, and writes the build record next to them."""

    def build_extensions(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        super().build_extensions()
        record = {"version": self.distribution.get_version(), "modules": self.records}
        file = Path(self.build_lib, RECORD)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=2) + "\n")

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.removeprefix("fastattn._")
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            if os.environ.get("FASTATTN_NATIVE") == "0":
                raise CannotBuild("FASTATTN_NATIVE=0 was set at installation")
            self.records[name] = {"built": True, **self.build(name, output)}
        except (CannotBuild, ImportError, OSError) as error:
            by_design = isinstance(error, NotWanted)
            if enabled("FASTATTN_REQUIRE_NATIVE") and not by_design:
                raise SystemExit(f"error: {ext.name} was not built: {error}") from error
            if not by_design:
                print(f"*** {ext.name} was not built: {error}", file=sys.stderr)
                print("*** fastattn will run in plain PyTorch instead.", file=sys.stderr)
            output.unlink(missing_ok=True)
            self.records[name] = {"built": False, "reason": str(error)}

    def build(self, name: str, output: Path) -> dict[str, Any]:
        plan = PLANS[name]()
        for isa, reason in plan.record["left_out"].items():
            print(f"*** fastattn._{name} is built without {isa}: {reason}", file=sys.stderr)
        import fcntl  # not at the top: other systems lack it, and fail with a reason while planning

        # Not build_temp: an editable install creates a new one each time, and would recompile all.
        base = self.get_finalized_command("build").build_base
        folder = Path(base, "native", name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX
            )  # concurrent builds would overwrite each other's objects
            (folder / "build.ninja").write_text(ninja_file(plan, output))
            run_ninja(folder)
        return plan.record

    def products(self) -> list[str]:
        """The built files, relative to the build folder and also to the source tree."""
        files = [*(self.get_ext_filename(ext.name) for ext in self.extensions), RECORD]
        return [file for file in files if Path(self.build_lib, file).exists()]

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            file = self.get_ext_filename(ext.name)
            if file not in self.products():  # a library of an earlier build must not stay
                (ROOT / file).unlink(missing_ok=True)
        for file in self.products():
            shutil.copy2(Path(self.build_lib, file), ROOT / f"{file}.new")
            os.replace(
                ROOT / f"{file}.new", ROOT / file
            )  # not copied in place: a process may have mapped the old one

    def get_output_mapping(self) -> dict[str, str]:
        files = self.products() if self.inplace else []
        return {str(Path(self.build_lib, file)): file for file in files}

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib, file)) for file in self.products()]


def version_of_libstdcxx() -> str:
    """The release of GCC that it comes with."""
    command = [*find_compiler(), "-dM", "-E", "-x", "c++", "-include", "cstddef", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"#define _GLIBCXX_RELEASE (\d+)", macros)[0]


def bill_of_materials(version: str, native: bool) -> dict[str, Any]:
    """What a wheel contains, in CycloneDX."""

    def component(name: str, version: str, licence: str, **more: str) -> dict[str, Any]:
        licences = [{"expression": licence}]
        return {"type": "library", "name": name, "version": version, "licenses": licences, **more}

    def package(name: str, version: str, licence: str) -> dict[str, Any]:
        return component(name, version, licence, purl=f"pkg:pypi/{name}@{version}")

    parts = []
    if native:  # its headers are compiled in
        parts.append(package("pybind11", metadata.version("pybind11"), "BSD-3-Clause"))
    if native and "-static-libstdc++" in os.environ.get("LDFLAGS", ""):
        licence = "GPL-3.0-or-later WITH GCC-exception-3.1"
        parts.append(component("libstdc++", version_of_libstdcxx(), licence))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": package("fastattn", version, "Apache-2.0")},
        "components": parts,
    }


class Wheel(bdist_wheel):
    """Writes a bill of materials where PEP 770 looks for it: ``*.dist-info/sboms``."""

    # The last that is written, and the only one of them that runs after the build with pip, too.
    def write_wheelfile(self, wheelfile_base: str, *args: Any, **options: Any) -> None:
        super().write_wheelfile(wheelfile_base, *args, **options)
        record = Path(self.bdist_dir, RECORD)
        built = json.loads(record.read_text())["modules"] if record.exists() else {}
        native = any(module["built"] for module in built.values())
        bill = bill_of_materials(self.distribution.get_version(), native)
        folder = Path(wheelfile_base, "sboms")
        folder.mkdir(exist_ok=True)
        Path(folder, "fastattn.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")


setup(
    ext_modules=[Extension(f"fastattn._{name}", sources=[], optional=True) for name in PLANS],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
