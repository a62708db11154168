"""The backends of this installation, and why the others are missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fastattn._version import __version__


def backend(name: str) -> dict[str, Any]:
    """{"built": bool, "reason": why it is not built, or None}, and the record of its build."""
    if importlib.util.find_spec(f"fastattn.backends.{name}") is None:
        return {"built": False, "reason": f"fastattn {__version__} has no {name} kernels"}
    if name in ("reference", "torch"):
        return {"built": True, "reason": None}
    if name == "triton":
        version = version_of("triton")
        reason = None if version else "triton is not installed: `pip install triton`"
        return {"built": version is not None, "reason": reason, "version": version}
    module = build_record().get("modules", {}).get(name)
    error = native_module(name)["error"]
    if error is None:
        return {**(module or {}), "built": True, "reason": None, "stale": is_stale()}
    if module is None:
        no_build = "there was no native build; run `make build` or `pip install .`"
        reason = hides_installed() or no_build
    elif not module["built"] and importlib.util.find_spec(f"fastattn._{name}") is None:
        reason = module["reason"]
    else:
        reason = f"it was built but cannot be used: {error}"
    return {**(module or {}), "built": False, "reason": reason}


def native_module(name: str) -> dict[str, Any]:
    """The `build_info` of `fastattn._<name>`, or the error of its import; the other one is None."""
    try:
        importlib.import_module(f"fastattn.backends.{name}")  # it selects the instruction set
        module = importlib.import_module(f"fastattn._{name}")
        return {"build_info": module.build_info(), "error": None}
    except Exception as error:  # such as a broken library, or an invalid FASTATTN_CPU_ISA
        return {"build_info": None, "error": f"{type(error).__name__}: {error}"}


def build_record() -> dict[str, Any]:
    """The record that setup.py wrote; empty without a native build."""
    try:
        record: dict[str, Any] = json.loads(Path(__file__).with_name("_build.json").read_text())
    except FileNotFoundError:
        return {}
    return record


def hides_installed() -> str | None:
    """What to do if this is a source tree without kernels that hides an installed fastattn."""
    own = Path(__file__).parent
    for folder in sys.path:
        package = Path(folder, "fastattn")
        if package != own and package.joinpath("_build.json").exists():
            return f"{own} has no kernels and hides {package}: start Python in another folder"
    return None


def is_stale() -> bool:
    """Whether this is a source tree whose kernels have changed since they were built."""
    package = Path(__file__).parent
    try:
        built_at = package.joinpath("_build.json").stat().st_mtime
    except FileNotFoundError:
        return False
    return any(path.stat().st_mtime > built_at for path in package.parent.glob("csrc/**/*.*"))


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
