"""Makes PyTorch and the native module share one OpenMP runtime, and so its threads.

The native module links to `libgomp.so.1`. PyTorch's wheels for x86-64 bundle their runtime under
that name, so there is only one. The wheels for arm64 before 2.10 bundle it under another name, so
the loader loads a second one; `share` makes it find PyTorch's runtime before that one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ENTRY_POINT = "GOMP_parallel"  # every parallel loop of GCC calls it


def _mapped_runtimes() -> list[tuple[int, int, str]]:
    """(start, end, file) of each mapping of an OpenMP runtime; none if Linux hides them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mappings = []
    for line in lines:
        path = line[line.index("/") :] if "/" in line else ""
        if path.rpartition("/")[2].startswith(("libgomp", "libomp", "libiomp")):
            start, end = line.split(None, 1)[0].split("-")
            mappings.append((int(start, 16), int(end, 16), path))
    return mappings


def runtimes() -> list[str]:
    """The files of the OpenMP runtimes in this process."""
    return sorted({path for _, _, path in _mapped_runtimes()})


def in_use() -> str | None:
    """The file of the runtime that every library finds first; None if each finds its own."""
    function = _first_entry_point()
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return next((path for start, end, path in _mapped_runtimes() if start <= address < end), None)


def _first_entry_point() -> Any:
    """The entry point of the first library that exports it globally; None if there is none."""
    return getattr(ctypes.CDLL(None), _ENTRY_POINT, None)


def share(folders: Sequence[Path]) -> None:
    """Export the GNU runtime that was loaded from one of the folders, so all libraries find it.

    Does nothing if a runtime is exported already.
    """
    if _first_entry_point() is not None:
        return
    for path in runtimes():
        if Path(path).parent in folders and Path(path).name.startswith("libgomp"):
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
            return
