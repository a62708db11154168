"""Builds the native modules, which know no torch: plain C++ behind pybind11, compiled through ninja.

`fastattn._cpu` is csrc/cpu/kernels/*.cpp, each compiled once per instruction set, and csrc/cpu/*.cpp, compiled once for
the baseline. A module that cannot be built is left out with a reason, and the library runs in PyTorch; what was built,
how, and why anything was not is written to `fastattn/_build.json`, where `python -m fastattn info` reads it.

Environment:
  FASTATTN_NATIVE=0           build no native module
  FASTATTN_REQUIRE_NATIVE=1   a module that cannot be built is an error
  FASTATTN_DEBUG=1            -O1 -g, library assertions on
  FASTATTN_SANITIZE=LIST      address, undefined, thread, or a comma-separated list of them
  MAX_JOBS=N                  at most N compilers at a time
  CXX, CXXFLAGS, LDFLAGS      as usual; fastattn's own flags come last
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
RECORD = "_build.json"

# Weakest first. Only kernels see these flags; what all sets share is compiled for the first.
X86_ISAS = {
    "baseline": ["-march=x86-64"],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512_bf16": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16"],
}
ISAS = X86_ISAS if platform.machine() in ("x86_64", "AMD64") else {"baseline": []}

# No -ffast-math: NaN and infinity are values that attention must carry. These three give up only errno, the floating
# point exception flags and the separate rounding of a product, which nothing here reads.
BASE_FLAGS = """-std=c++17 -fPIC -fvisibility=hidden -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast
                -Wall -Wextra -Wno-psabi""".split()
SANITIZERS = ("address", "undefined", "thread")


class CannotBuild(Exception):
    """Why a native module is left out, as one plain sentence."""


@dataclass
class Plan:
    """One shared library: its objects as (source, object name, flags), and what the build record says of it."""

    objects: list[tuple[Path, str, list[str]]] = field(default_factory=list)
    link_flags: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "no", "off")


def words(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def find_compiler() -> list[str]:
    """The C++ compiler as a command; $CXX may carry a wrapper, such as `ccache g++`."""
    if command := words("CXX"):
        if shutil.which(command[0]) is None:
            raise CannotBuild(f"the compiler named by CXX, {command[0]!r}, was not found")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler was found (looked for $CXX, g++, c++, clang++)")


def first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message"
    )


def compile_error(compiler: list[str], flags: list[str], source: str) -> str | None:
    """None if `source` compiles and links to a shared library with `flags`, else the compiler's first complaint."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "probe.cpp")
        file.write_text(source)
        command = [*compiler, *flags, "-shared", file.name, "-o", "probe.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else first_error(done.stderr)


def optimisation_flags() -> tuple[list[str], list[str]]:
    """The flags for compiling and for linking that depend on FASTATTN_DEBUG and FASTATTN_SANITIZE."""
    sanitize = [name for name in os.environ.get("FASTATTN_SANITIZE", "").split(",") if name]
    if unknown := [name for name in sanitize if name not in SANITIZERS]:
        raise CannotBuild(
            f"FASTATTN_SANITIZE={unknown[0]!r} is unknown; allowed are {', '.join(SANITIZERS)}"
        )
    if not sanitize and not flag("FASTATTN_DEBUG"):
        return ["-O3"], []
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    if not sanitize:
        return flags, []
    # The vptr check needs the type information that hidden visibility keeps inside each library.
    flags += [
        f"-fsanitize={','.join(sanitize)}",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=undefined",
    ]
    return flags, [f"-fsanitize={','.join(sanitize)}"]


def plan_cpu() -> Plan:
    """Every kernel once per instruction set, the rest once, and a define that tells the rest which sets there are."""
    import pybind11

    if sys.platform != "linux":
        raise CannotBuild(f"the native core is built on Linux only so far; this is {sys.platform}")
    compiler = find_compiler()
    optimise, link = optimisation_flags()
    flags = [*words("CXXFLAGS"), *BASE_FLAGS, *optimise]
    if error := compile_error(
        compiler, flags, "#include <omp.h>\nint n() { return omp_get_max_threads(); }\n"
    ):
        raise CannotBuild(f"{compiler[-1]} cannot compile C++17 with OpenMP: {error}")

    left_out = {
        isa: f"{compiler[-1]} refuses {' '.join(isa_flags)}: {error}"
        for isa, isa_flags in ISAS.items()
        if (error := compile_error(compiler, [*flags, *isa_flags], "int n() { return 0; }\n"))
    }
    isas = {isa: isa_flags for isa, isa_flags in ISAS.items() if isa not in left_out}
    if "baseline" not in isas:
        raise CannotBuild(left_out["baseline"])

    plan = Plan(link_flags=[*words("LDFLAGS"), "-fopenmp", *link])
    for source in sorted((ROOT / "csrc/cpu/kernels").glob("*.cpp")):
        for isa, isa_flags in isas.items():
            plan.objects.append(
                (source, f"{source.stem}.{isa}.o", [*flags, *isa_flags, f"-DFASTATTN_ISA={isa}"])
            )
    include = [
        f"-isystem{path}" for path in (sysconfig.get_paths()["include"], pybind11.get_include())
    ]
    have = [f"-DFASTATTN_HAVE_{isa.upper()}=1" for isa in isas]
    for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        plan.objects.append(
            (source, f"{source.stem}.o", [*flags, *isas["baseline"], *have, *include])
        )

    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    plan.record = {
        "compiler": version.splitlines()[0],
        "flags": " ".join(flags),
        "isas": {isa: " ".join(isa_flags) for isa, isa_flags in isas.items()},
        "left_out": left_out,
    }
    return plan


# A second module, say `_cuda`, is one more function here: each is planned, built and recorded by itself, so that a
# broken nvcc cannot lose the CPU kernels.
PLANS: dict[str, Callable[[], Plan]] = {"cpu": plan_cpu}


def write_ninja(plan: Plan, folder: Path, output: Path) -> None:
    def escape(path: Path | str) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def command_line(arguments: list[str]) -> str:
        return shlex.join(arguments).replace("$", "$$")

    compiler = command_line(find_compiler())
    lines = [
        "rule compile",
        f"  command = {compiler} -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = {compiler} -shared $in -o $out $flags",
        "  description = link $out",
    ]
    for source, name, flags in plan.objects:
        lines += [
            f"build {escape(name)}: compile {escape(source)}",
            f"  flags = {command_line(flags)}",
        ]
    names = " ".join(escape(name) for _, name, _ in plan.objects)
    lines += [
        f"build {escape(output)}: link {names}",
        f"  flags = {command_line(plan.link_flags)}",
        "",
    ]
    (folder / "build.ninja").write_text("\n".join(lines))


def run_ninja(folder: Path) -> None:
    import ninja

    command = [str(Path(ninja.BIN_DIR, "ninja")), "-C", str(folder)]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode != 0:
        errors = [line for line in lines if "error" in line.lower()]
        raise CannotBuild(f"the compiler failed: {first_error(''.join(errors or lines))}")


class BuildNative(build_ext):
    """Builds each module of PLANS independently and leaves the build record beside them."""

    def run(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        super().run()
        record = {"version": self.distribution.get_version(), "modules": self.records}
        folders = [Path(self.build_lib, "fastattn")]
        if self.inplace:
            folders.append(ROOT / "fastattn")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition("._")[2]
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            if os.environ.get("FASTATTN_NATIVE") == "0":
                raise CannotBuild("FASTATTN_NATIVE=0 was set when fastattn was installed")
            plan = self.build(name, output)
        except (CannotBuild, ImportError, OSError) as error:
            if flag("FASTATTN_REQUIRE_NATIVE"):
                raise SystemExit(
                    f"error: fastattn.{ext.name.rpartition('.')[2]} was not built: {error}"
                ) from error
            output.unlink(missing_ok=True)
            self.records[name] = {"built": False, "reason": str(error)}
            print(
                f"*** {ext.name} was not built: {error}\n*** fastattn will run in PyTorch.",
                file=sys.stderr,
            )
            return
        for isa, reason in plan.record.get("left_out", {}).items():
            print(f"*** {ext.name} is built without {isa}: {reason}", file=sys.stderr)
        self.records[name] = {"built": True, **plan.record}

    def build(self, name: str, output: Path) -> Plan:
        plan = PLANS[name]()
        import fcntl  # not before: there is none on Windows, where planning has just said so

        folder = Path(self.build_temp, name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open(
            "w"
        ) as lock:  # two builds at once would spoil each other's objects
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_ninja(plan, folder, output)
            run_ninja(folder)
        return plan

    def copy_extensions_to_source(self) -> None:
        """In place: replace each library at once, since a running process may have the old one mapped."""
        for ext in self.extensions:
            file = self.get_ext_filename(ext.name)
            built, inplace = Path(self.build_lib, file), ROOT / file
            if built.exists():
                shutil.copy2(built, f"{inplace}.new")
                os.replace(f"{inplace}.new", inplace)
            else:
                inplace.unlink(missing_ok=True)

    def get_output_mapping(self) -> dict[str, str]:
        """What --inplace copies, built file to source file: only what could be built, and the record."""
        if not self.inplace:
            return {}
        files = [
            *(self.get_ext_filename(ext.name) for ext in self.extensions),
            f"fastattn/{RECORD}",
        ]
        return {
            f"{self.build_lib}/{file}": file
            for file in files
            if Path(self.build_lib, file).exists()
        }

    def get_outputs(self) -> list[str]:
        files = [
            *(self.get_ext_filename(ext.name) for ext in self.extensions),
            f"fastattn/{RECORD}",
        ]
        return [
            path for file in files if (path := f"{self.build_lib}/{file}") and Path(path).exists()
        ]


setup(
    ext_modules=[Extension(f"fastattn._{name}", sources=[], optional=True) for name in PLANS],
    cmdclass={"build_ext": BuildNative},
)
