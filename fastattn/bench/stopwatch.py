"""Measures the part of a call that is of interest."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._began
