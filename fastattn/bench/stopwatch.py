"""Measures a part of a call."""

from __future__ import annotations

import time


class Stopwatch:
    """The total seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._began
