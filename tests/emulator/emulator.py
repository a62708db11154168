"""Builds csrc/cuda with g++ over the emulator: the very sources of `_cuda`, on CPU tensors.

`load()` returns the adapter `fastattn.backends.cuda`, bound to the emulated module instead of the
real one. The object files are kept in `build/emulator`, one folder for each set of flags, and
rebuilt if a source, or a header that it includes, is newer.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build/emulator/plain"
Flags = tuple[str, ...]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

# -Og compiles in half of the time of -O1, and kernels run as fast. Only the emulator itself has
# loops worth more.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
COMMON += ["-Wno-unknown-pragmas", "-DFASTATTN_EMULATED", "-DFASTATTN_HOPPER"]


class CannotBuild(Exception):
    """The reason why the emulator cannot be built here."""


def compiler() -> list[str]:
    """The C++ compiler that CXX names, g++ by default."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        raise CannotBuild(f"no C++ compiler: {command[0]!r} was not found")
    return command


# (source, name of the object, flags)
Unit = tuple[Path, str, list[str]]


def _python_flags() -> list[str]:
    """The headers of Python and of pybind11, which PyTorch also ships."""
    try:
        headers = importlib.import_module("pybind11").get_include()
    except ImportError:
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            raise CannotBuild("there is no pybind11 here") from None
        headers = str(Path(torch.origin).parent / "include")
    return [f"-isystem{sysconfig.get_paths()['include']}", f"-isystem{headers}"]


def _emulator() -> Iterable[Unit]:
    """The sources of the emulator itself."""
    for source in sorted(HERE.glob("*.cpp")):
        yield source, source.stem, ["-O2"]


def is_for_hopper(source: Path) -> bool:
    return source.parent.name == "hopper"


def elements(source: Path) -> tuple[str, ...]:
    """The element types that kernels are compiled for; tf32 is float32 to all but attention."""
    if is_for_hopper(source):
        return ("Bf16", "F16")
    return ("Bf16", "F16", "F32", *(["Tf32"] if source.stem.startswith("sdpa") else []))


def _kernels(csrc: Path) -> Iterable[Unit]:
    """The sources of the CUDA module, each CUDA source once for each element type."""
    yield csrc / "cuda/bindings.cpp", "bindings", ["-Og", *_python_flags()]
    kernels = csrc / "cuda/kernels"
    for source in sorted(kernels.rglob("*.cu")):
        # With the folder: an operator has the same file name in each.
        name = source.relative_to(kernels).with_suffix("")
        for element in elements(source):
            flags = ["-Og", "-x", "c++", f"-DFASTATTN_ELEMENT={element}"]
            yield source, f"{name}.{element}", flags


def _run(command: list[str]) -> None:
    """Run a command, or raise its output as an error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)}\n{done.stderr[-3000:]}")


def _is_current(target: Path) -> bool:
    """Is the object newer than its source and every header that the compiler read for it?"""
    read = Path(f"{target}.d")
    if not (target.exists() and read.exists()):
        return False
    files = read.read_text().replace("\\\n", " ").partition(": ")[2].split()
    made = target.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) <= made for file in files)


def _compile(unit: Unit, folder: Path, extra: Flags) -> Path:
    """Compile one source to an object file, unless it is up to date."""
    source, stem, flags = unit
    target = folder / f"{stem}.o"
    if not _is_current(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler(), *COMMON, *extra, f"-I{ROOT / 'tests'}", *flags]
        _run([*command, "-MMD", "-MF", f"{target}.d", "-c", str(source), "-o", f"{target}.new"])
        os.replace(f"{target}.new", target)
    return target


def _link(library: Path, objects: Iterable[Path], extra: Flags) -> None:
    """Link a library under another name, and put it in place at once."""
    linked = f"{library}.new"
    _run([*compiler(), *extra, "-shared", *map(str, objects), "-o", linked])
    os.replace(linked, library)


def _library(
    name: str, units: Iterable[Unit], folder: Path, extra: Flags, ready: Iterable[Path] = ()
) -> Path:
    """Compile all units in parallel and link them to a Python module."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}{SUFFIX}"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool:
            objects = [*pool.map(lambda unit: _compile(unit, folder, extra), units), *ready]
        newest_object = max(path.stat().st_mtime for path in objects)
        if not library.exists() or library.stat().st_mtime < newest_object:
            _link(library, objects, extra)
    return library


def build() -> Path:
    """Return the path of the emulated `_cuda`."""
    return _library("_cuda", [*_emulator(), *_kernels(ROOT / "csrc")], FOLDER, ())


def build_with(flags: Flags, folder: Path, only: Iterable[str]) -> Path:
    """As `build`, with more flags and only the kernels of some element types."""
    build()
    changed: list[Unit] = []
    ready = []
    for unit in (*_emulator(), *_kernels(ROOT / "csrc")):
        element = unit[1].partition(".")[2]
        if element and element not in only:
            ready.append(FOLDER / f"{unit[1]}.o")
        else:
            changed.append(unit)
    return _library("_cuda", changed, folder, flags, ready)


def build_changed(csrc: Path, folder: Path, sources: Iterable[str], element: str) -> Path:
    """As `build`, but with some sources' kernels of one element type made of another `csrc`."""
    build()
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{source}.{element}" for source in sources]
    units = {unit[1]: unit for unit in (*_emulator(), *_kernels(csrc))}
    # A change may leave a variable unused. They come first: of an inline function that several
    # objects have, the linker takes the first one.
    objects = [_compile(units[name], folder, ("-Wno-error",)) for name in names]
    objects += [FOLDER / f"{stem}.o" for stem in units if stem not in names]
    library = folder / f"_cuda{SUFFIX}"
    _link(library, objects, ())
    return library


def build_conformance(cuda: bool = False) -> Path:
    """Return the path of `_conformance`, which runs each PTX wrapper alone."""
    source = HERE / "conformance/module.cu"
    if not cuda:
        unit = (source, "conformance", ["-O1", "-x", "c++", *_python_flags()])
        return _library("_conformance", [*_emulator(), unit], FOLDER, ())
    import torch

    library = FOLDER / f"cuda/_conformance{SUFFIX}"
    library.parent.mkdir(parents=True, exist_ok=True)
    # nvcc's own -arch=native leaves out what sm_90a has beyond sm_90.
    capability = torch.cuda.get_device_capability()
    arch = "90a" if capability == (9, 0) else "{}{}".format(*capability)
    _run(conformance_command(arch, library, "-shared", "-Xcompiler", "-fPIC"))
    return library


def conformance_command(arch: str, target: Path, *options: str) -> list[str]:
    """How nvcc compiles `_conformance` for an architecture."""
    includes = [flag.replace("-isystem", "-I") for flag in _python_flags()]
    command = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    source = HERE / "conformance/module.cu"
    return [*command, *includes, *options, str(source), "-o", str(target)]


def load_conformance(library: Path) -> ModuleType:
    """Load the module of the conformance tests."""
    spec = importlib.util.spec_from_file_location("_conformance", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_from(library: Path) -> ModuleType:
    """Return a copy of the adapter `fastattn.backends.cuda` that calls this library."""
    import fastattn
    from fastattn import backends

    def ours(name: str) -> bool:
        return name == "fastattn._cuda" or f"{name}.".startswith("fastattn.backends.cuda.")

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    places = ((fastattn, "_cuda"), (backends, "cuda"))
    attributes = [(place, name, place.__dict__.pop(name, None)) for place, name in places]
    try:
        spec = importlib.util.spec_from_file_location("fastattn._cuda", library)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        sys.modules["fastattn._cuda"] = native  # where the adapter's imports look
        adapter = importlib.import_module("fastattn.backends.cuda")
        adapter.__dict__["_cuda"] = native  # for its set_seed
        return adapter
    finally:
        for name in filter(ours, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
        for place, name, was in attributes:
            place.__dict__.pop(name, None)
            if was is not None:
                setattr(place, name, was)


@functools.cache
def load() -> ModuleType:
    """Return the adapter of the CUDA kernels, running on CPU tensors under the emulator."""
    return load_from(build())
