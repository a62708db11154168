"""What a worker measures beside the time of a call: caches, peak memory, the state of the cores.

A core that others share is alone or has a neighbour, such as another machine on its second
hyperthread, and its state lasts 10 milliseconds to many seconds. A neighbour slows one kernel down
more than another, so a ratio of two samples means something only if both ran in the same state.
A neighbour shows in the time of a short kernel. Another process of this machine does not, because
it takes the core for milliseconds at a time; the system counts that.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn import scaled_dot_product_attention, use_backend
from fastattn.dispatch import PRIORITY, load

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PROCESS = Path("/proc/self")
# Of which the fastest counts: the first ones load the code, and an interrupt is no neighbour.
_PROBES = 6


class Stopwatch:
    """The total seconds between `start` and `stop`: measures a part of a call."""

    seconds = began = 0.0
    is_running = False

    def start(self) -> None:
        self.is_running = True
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.began
        self.is_running = False


def last_level_bytes() -> int:
    """The size of the largest cache of a processor; 32 MB if the system does not report it."""
    try:
        texts = [(index / "size").read_text().strip() for index in _CACHES.glob("index*")]
        return max(int(text[:-1]) * _UNITS[text[-1]] for text in texts)
    except (OSError, ValueError, KeyError, IndexError):
        return _UNKNOWN_CACHE


def flush_caches(device: str) -> None:
    """Writes a buffer twice as large as the last-level cache, which evicts all other data."""
    _buffer(device).add_(1)


@functools.cache
def _buffer(device: str) -> Tensor:
    count = 2 * last_level_bytes() // 4 if device == "cpu" else 64 << 20
    return torch.zeros(count, device=device)


def peak_extra_bytes(call: Callable[[], Any], device: str = "cpu") -> tuple[Any, int | None]:
    """The result of a call, and the largest growth of the process during it; None if unknown.

    Outputs are counted, inputs are not. Linux records the highest resident size (VmHWM) and can
    reset it. Free pages of the allocator are returned to the system first, because a call that
    reuses them would seem to need no memory. On a GPU, PyTorch's allocator counts.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = call()
        return result, torch.cuda.max_memory_allocated() - held
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")  # resets VmHWM to the current size
        before = _resident("VmRSS")
    except (OSError, AttributeError, KeyError):
        return call(), None
    result = call()
    return result, max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


class Probe:
    """Attention on one small head per thread, in the caches: about 30 microseconds.

    In bf16, which runs on the tiles of AMX, if there are any: a neighbour slows them down most. On
    one thread of a Zen 3 it takes 21 microseconds alone, and 31 to 44 with a neighbour.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.rows = torch.ones(threads, 1, 64, 64, dtype=torch.bfloat16)
        self.backend = next(name for name in PRIORITY["cpu"] if not isinstance(load(name), str))

    def __call__(self) -> float:
        """The microseconds of the kernel."""
        usual, best = torch.get_num_threads(), float("inf")
        if usual != self.threads:  # only then, because it empties the caches of oneDNN
            torch.set_num_threads(self.threads)
        with torch.no_grad(), use_backend(self.backend):  # whatever the provider forces
            for _ in range(_PROBES):
                start = time.perf_counter()
                scaled_dot_product_attention(self.rows, self.rows, self.rows)
                best = min(best, time.perf_counter() - start)
        if usual != self.threads:
            torch.set_num_threads(usual)
        return best * 1e6


def times_pushed() -> int:
    """How often another process took a core from a thread of this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
