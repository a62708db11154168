"""How `fastattn._cuda` is built.

nvcc compiles csrc/cuda/kernels/**/*.cu once per element type, the C++ compiler
csrc/cuda/bindings.cpp, which includes all csrc/cuda/bind_*.cpp.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from plans.compilers import PYTHON, ROOT, CannotBuild, NotWanted, Plan, find_compiler, words


def is_for_hopper(source: Path) -> bool:
    return source.parent.name == "hopper"


def cuda_elements(source: Path) -> tuple[str, ...]:
    """The element types that kernels are compiled for; only attention has tf32 besides float32."""
    if is_for_hopper(source):
        return ("Bf16", "F16")
    return ("Bf16", "F16", "F32", *(["Tf32"] if source.stem.startswith("sdpa") else []))


CUDA_ARCHS = "80;90a"
HOPPER_ARCH = "-gencode=arch=compute_90a,code=sm_90a"


NOT_INSTALLED = "the CUDA kernels are a package of their own, fastattn-cuda, which is not installed"


def find_nvcc() -> str:
    """The CUDA compiler, or an error that says why there is none."""
    wanted = os.environ.get("FASTATTN_CUDA")
    if wanted == "0":
        raise NotWanted("FASTATTN_CUDA=0 was set at installation")
    if wanted == "separate":
        raise NotWanted(NOT_INSTALLED)
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


def plan() -> Plan:
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
    objects.append((ROOT / "csrc/cuda/bindings.cpp", f"{PYTHON}/bindings.o", host))
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
