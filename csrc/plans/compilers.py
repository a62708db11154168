"""Shared by both modules: plans, the reasons against one, and queries of a C++ compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Only the objects that include Python's headers differ between Pythons; the others are shared.
PYTHON = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag


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
    """Whether an environment variable is set to something but 0."""
    return os.environ.get(name, "0") not in ("", "0")


def words(name: str) -> list[str]:
    """The words of an environment variable."""
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
    """The first line of a compiler's output that is an error."""
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


def features(compiler: list[str], flags: list[str]) -> set[str]:
    """The macros that the compiler defines under these flags; empty if it rejects them."""
    command = [*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())
