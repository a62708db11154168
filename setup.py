"""Builds the native modules, C++ with pybind11 and without torch, by ninja.

csrc/plans/cpu.py plans `fastattn._cpu`, and csrc/plans/cuda.py `fastattn._cuda`, which needs nvcc:
their sources and flags, and what is left out. The library also runs without a module that cannot be
built. `fastattn/_build.json` records what was built, how, and why anything was not; `fastattn info`
shows it.

Environment:
  FASTATTN_NATIVE=0           build no native module
  FASTATTN_REQUIRE_NATIVE=1   a module that cannot be built is an error; a missing nvcc is not
  FASTATTN_CPU_ISAS=native    compile only for the strongest instruction set of this machine, what
                              it extends, the baseline, and the tiles of AMX: half the build time,
                              for use on this machine only
  FASTATTN_CPU_EMULATED=1     build the emulated instruction sets, too, which tests run where the
                              processor lacks the real ones: vectors in bf16 only, or `all` dtypes
  FASTATTN_CUDA=0             do not build _cuda, even if there is an nvcc
  FASTATTN_CUDA=separate      the same, for wheels to distribute: they say that the CUDA kernels are
                              a package of their own
  FASTATTN_CUDA_ARCHS=LIST    the architectures of _cuda, by default 80;90a; other GPUs from 8.0 on
                              run the PTX of the lowest one
  NVCC                        the CUDA compiler; default: nvcc in PATH or CUDA_HOME
  FASTATTN_DEBUG=1            -O1 -g, with library assertions
  FASTATTN_SANITIZE=LIST      address, undefined, thread; comma-separated
  MAX_JOBS=N                  run at most N compilers at a time
  CXX, CXXFLAGS, LDFLAGS      as usual; the flags of csrc/plans follow CXXFLAGS and override it. A
                              cross compiler builds the instruction sets of its own target
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc"))  # an isolated build leaves the folder of setup.py out
without_bytecode = sys.dont_write_bytecode
sys.dont_write_bytecode = True  # a new file in csrc would mean that the build is stale

from plans import cpu, cuda  # noqa: E402
from plans.compilers import (  # noqa: E402
    CannotBuild,
    NotWanted,
    Plan,
    enabled,
    find_compiler,
    first_error,
)

sys.dont_write_bytecode = without_bytecode

RECORD = "fastattn/_build.json"
# Each is planned, built and recorded separately, so a broken nvcc does not affect the CPU kernels.
PLANS: dict[str, Callable[[], Plan]] = {"cpu": cpu.plan, "cuda": cuda.plan}


def ninja_file(plan: Plan, folder: Path, output: Path) -> str:
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
        # Relative, so that a copy of the tree with its objects compiles nothing again.
        relative = path(os.path.relpath(source, folder))
        lines += [f"build {path(name)}: {rule} {relative}", f"  flags = {quoted(*flags)}"]
    names = " ".join(path(name) for _, name, _ in plan.objects)
    lines += [f"build {path(output)}: link {names}", f"  flags = {quoted(*plan.link_flags)}", ""]
    return "\n".join(lines)


def run_ninja(folder: Path) -> None:
    import ninja

    program = str(Path(ninja.BIN_DIR, "ninja"))  # BIN_DIR is empty where PATH has to tell
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    command = [program, "-C", str(folder)]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    # Seen with `pip install -v`: ninja estimates from the files that it has compiled, from 1.12 on.
    estimates = tuple(map(int, version.stdout.split(".")[:2])) >= (1, 12)
    status = "[%f/%t, %w, about %W left] " if estimates else "[%f/%t] "
    environment = {"NINJA_STATUS": status, **os.environ}
    output = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
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
            # Concurrent builds would overwrite each other's objects.
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "build.ninja").write_text(ninja_file(plan, folder, output))
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
            # Not copied in place: a process may have mapped the old one.
            os.replace(ROOT / f"{file}.new", ROOT / file)

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
