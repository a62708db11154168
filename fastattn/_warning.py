"""Warnings that name the line of the user, however deep in the library they begin."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither in fastattn nor in torch."""
    warnings.warn(message, category, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """How many stack frames are in fastattn and torch, as ``stacklevel`` counts them.

    It leaves out the frames of the import system.
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
