"""Makes PyTorch and the native module share one OpenMP runtime, and so its threads.

The native module links to `libgomp.so.1`. PyTorch's wheels for x86-64 bundle their runtime under
that name, so there is only one. The wheels for arm64 before 2.10 bundle it under another name, so
the loader loads a second one; `share` then makes the loader find PyTorch's first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_A_FUNCTION = "GOMP_parallel"  # every parallel loop of GCC begins with it


def _mapped() -> list[tuple[int, int, str]]:
    """The addresses and files of the OpenMP runtimes of this process; none if Linux hides them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        path = line[line.index("/") :] if "/" in line else ""
        if path.rpartition("/")[2].startswith(("libgomp", "libomp", "libiomp")):
            start, end = line.split(None, 1)[0].split("-")
            found.append((int(start, 16), int(end, 16), path))
    return found


def runtimes() -> list[str]:
    """The files of the OpenMP runtimes in this process."""
    return sorted({path for _, _, path in _mapped()})


def in_use() -> str | None:
    """The file of the runtime that every library finds first; None if each finds its own."""
    function = _found_first()
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return next((path for start, end, path in _mapped() if start <= address < end), None)


def _found_first() -> Any:
    """The function of the first library that exports its symbols globally."""
    return getattr(ctypes.CDLL(None), _A_FUNCTION, None)


def share(folders: Sequence[Path]) -> None:
    """Make the loader find the GNU runtime loaded from one of the folders first.

    Does nothing if a runtime is found globally already.
    """
    if _found_first() is not None:
        return
    for path in runtimes():
        if Path(path).parent in folders and Path(path).name.startswith("libgomp"):
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
            return
