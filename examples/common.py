"""Checkpoints and a progress bar for the examples."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["Checkpoint", "shown"]

T = TypeVar("T")


class Checkpoint:
    """The state of every training of a run, in one file; without a path, nothing is kept."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self.path, self.run = path, run
        self.states: dict[str, Any] = {}
        if path is not None and path.exists():
            saved = torch.load(path, weights_only=True)
            if saved["run"] != run:
                raise ValueError(f"{path} belongs to another run: {saved['run']}, not {run}")
            self.states = saved["states"]

    def write(self, name: str, state: dict[str, Any]) -> None:
        """Replace the file at once, so that an interrupted write loses nothing."""
        if self.path is None:
            return
        self.states[name] = state
        new = self.path.with_suffix(".new")
        torch.save({"run": self.run, "states": self.states}, new)
        os.replace(new, self.path)


def shown(steps: Iterable[T], label: str) -> Iterator[T]:
    """A progress bar on a terminal, if ``rich`` is there."""
    with contextlib.suppress(ImportError):
        from rich.progress import track

        if sys.stdout.isatty():
            return iter(track(steps, label, transient=True))
    return iter(steps)
