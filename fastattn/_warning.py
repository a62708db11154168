"""Warnings that point to the user's line, however deep in the library they are raised."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line outside of fastattn and torch."""
    warnings.warn(message, category, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """The number of stack frames in fastattn and torch, as ``stacklevel`` counts them.

    ``stacklevel`` skips the frames of the import system.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame:
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        imports = package == "importlib" and module.startswith("_bootstrap")
        if package not in ("fastattn", "torch") and not imports:
            break
        frame, depth = frame.f_back, depth + (not imports)
    return depth - 1
