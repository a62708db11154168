"""Peak memory of one call: the largest growth of the process during the call.

Linux records the highest resident size of a process (VmHWM) and can reset it. Outputs are counted,
inputs are not. Free pages in the allocator are returned to the system first, because a call that
reuses them would seem to need no memory. On other systems the value is None. On a GPU, PyTorch's
allocator counts.
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
    """The result of the call, and its peak memory in bytes; None if unknown."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = call()
        return result, torch.cuda.max_memory_allocated() - held
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")  # resets VmHWM to the current size
        before = _resident("VmRSS")
    except (OSError, AttributeError, KeyError):
        return call(), None
    result = call()
    return result, max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
