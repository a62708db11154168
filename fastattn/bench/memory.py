"""Peak memory of one call: by how much the process grew at its highest, as the kernel counted it.

Linux keeps the highest resident size of a process (VmHWM) and lets it be reset. The call's outputs
are counted, its inputs are not. Pages that an earlier call left in the allocator are given back
first, or they would hide what the call takes. Elsewhere there is no honest number, and none is
given. On a GPU it is PyTorch's allocator that counts.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_extra_bytes(call: Callable[[], Any], device: str = "cpu") -> tuple[Any, int | None]:
    """The call's result, and by how much the process peaked above its start; None if unknown."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = call()
        return result, torch.cuda.max_memory_allocated() - held
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")  # resets VmHWM to the present size
        before = _resident("VmRSS")
    except (OSError, AttributeError, KeyError):
        return call(), None
    result = call()
    return result, max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
