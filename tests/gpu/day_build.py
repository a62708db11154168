"""The CUDA module of `make gpu-day`: built where the GPU is, or before and packed.

A module is taken as it is only if `fastattn/_build.json`, the record of the build, has the digest
of it and the sources that are there. Unlike times, a digest survives copying.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TREE_LIMIT = 64  # MiB: what may be copied to a machine
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
RECORD = "fastattn/_build.json"
NOTED = "made_of"  # what `note` adds to the record: module -> digest


def build() -> int:
    """Builds the module for this Python, unless the one that is there is of these sources; in a
    rehearsal the emulated one."""
    if "FASTATTN_REHEARSAL" in os.environ:
        emulator = importlib.import_module("emulator")
        for path in (emulator.build(), emulator.build_conformance()):
            print(f"emulated: {path.relative_to(ROOT)}")
        return 0
    module = ROOT / f"fastattn/_cuda{SUFFIX}"
    if module.exists():
        name = module.relative_to(ROOT)
        if is_current(module):
            print(f"taken as it is: {name}, {size_of([module]):.1f} MiB")
            return _imports()
        print(f"not taken: {RECORD} does not say that {name} is made of these sources")
        if reason := _why_not_compiled():  # the build would delete the module
            print(f"{name} is not of these sources, and cannot be built here: {reason}")
            return 1
    import torch

    major, minor = torch.cuda.get_device_capability()
    arch = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    wanted = {
        "FASTATTN_CUDA": "1",
        "FASTATTN_CUDA_ARCHS": os.environ.get("FASTATTN_CUDA_ARCHS", arch),
        "FASTATTN_CPU_ISAS": "native",
        "FASTATTN_REQUIRE_NATIVE": "1",
    }
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | wanted, check=False).returncode
    if code == 0 and module.exists():
        note([module])
    return code or _imports()


def _imports() -> int:
    """Whether a new process can use the module."""
    words = "from fastattn.backends import cuda; print(cuda.operands.INFO)"
    return subprocess.run([sys.executable, "-c", words], cwd=ROOT, check=False).returncode


def _why_not_compiled() -> str:
    """Why no CUDA module can be built here; empty where one can."""
    found = subprocess.run(
        [sys.executable, "-B", "-c", "from plans.cuda import find_nvcc; find_nvcc()"],
        cwd=ROOT / "csrc", env=os.environ | {"FASTATTN_CUDA": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stderr.strip().rpartition("\n")[2].partition(": ")[2] if found.returncode else ""


def sources() -> list[Path]:
    """The files that the CUDA module is compiled from, by the flags and the version of two more."""
    csrc = ROOT / "csrc"
    more = [csrc / "plans/cuda.py", ROOT / "fastattn/_version.py"]
    return sorted([*csrc.glob("*.h"), *filter(Path.is_file, (csrc / "cuda").rglob("*")), *more])


def digest(module: Path) -> str:
    """Of a module and the sources. It stays the same when both are copied, and times do not."""
    whole = hashlib.sha256(module.read_bytes())
    for path in sources():
        whole.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def note(modules: Iterable[Path]) -> None:
    """Adds to the record of the build that these modules are made of the sources as they are."""
    record = _record()
    record[NOTED] = {module.name: digest(module) for module in modules}
    (ROOT / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def is_current(module: Path) -> bool:
    """Whether the record says that the module is made of the sources as they are."""
    return bool(_record().get(NOTED, {}).get(module.name) == digest(module))


def _record() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((ROOT / RECORD).read_text())
    return found


def pack() -> int:
    """Strips the modules that are built here, notes what they are made of, and counts what a
    machine would be sent."""
    modules = sorted((ROOT / "fastattn").glob("_c*.so"))
    ours = [module for module in modules if module.name.startswith("_cuda.")]
    if not ours:
        raise SystemExit(
            "no CUDA module is built here; build it with the target's version of Python: "
            "FASTATTN_CUDA=1 python setup.py build_ext --inplace"
        )
    newest = max(sources(), key=lambda path: path.stat().st_mtime)
    for module in ours:
        if module.stat().st_mtime < newest.stat().st_mtime and not is_current(module):
            raise SystemExit(
                f"{module.relative_to(ROOT)} is older than {newest.relative_to(ROOT)}: build it "
                "again, or delete it"
            )
    for module in modules:
        subprocess.run(["strip", "--strip-unneeded", module], check=True)
    note(ours)
    for module in modules:
        name, *tag, _ = module.name.split(".")
        print(f"{name} for {''.join(tag) or 'any Python'}: {size_of([module]):.1f} MiB")
    total = size_of([*tree(), *modules, ROOT / RECORD])
    print(
        f"The tree has {total:.1f} MiB with these and {RECORD}; at most {TREE_LIMIT} can be sent."
    )
    return 1 if total > TREE_LIMIT else 0


def tree() -> list[Path]:
    """The files that Git has, or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name]


def size_of(files: Iterable[Path]) -> float:
    """In MiB."""
    return sum(file.lstat().st_size for file in files if file.exists()) / 2**20
