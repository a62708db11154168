"""The size of the caches, and how to flush them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_bytes() -> int:
    """The size of the largest cache of a processor; 32 MB if the system does not report it."""
    try:
        texts = [(index / "size").read_text().strip() for index in _CPU.glob("index*")]
        return max(int(text[:-1]) * _UNITS[text[-1]] for text in texts)
    except (OSError, ValueError, KeyError, IndexError):
        return _UNKNOWN


class Sweeper:
    """Writes a buffer twice as large as the last-level cache, which evicts all other data."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def sweep(self, device: str) -> None:
        if self._buffer is None or self._buffer.device.type != device:
            count = 2 * last_level_bytes() // 4 if device == "cpu" else 64 << 20
            self._buffer = torch.zeros(count, device=device)
        self._buffer.add_(1)
