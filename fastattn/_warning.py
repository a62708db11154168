"""Warnings that name the line of the user, however deep in the library they begin."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["warn"]


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither in fastattn nor in torch."""
    warnings.warn(message, category, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """How many stack frames are in fastattn and torch."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("fastattn", "torch"):
        frame, depth = frame.f_back, depth + 1
    return depth - 1
