"""The checks of the sizes of modules."""

from __future__ import annotations

import operator
from typing import Any

from fastattn.checks import check_int64


def check_integers(**values: Any) -> None:
    """Raise TypeError unless each argument is an integer that fits int64."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        check_int64(name, operator.index(value))


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError unless each argument is a positive integer."""
    for name, size in sizes.items():
        integer = not isinstance(size, bool) and hasattr(size, "__index__")
        if not integer or operator.index(size) < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_optional_sizes(**sizes: Any) -> None:
    """Raise ValueError unless each argument is a positive integer or None."""
    check_sizes(**{name: size for name, size in sizes.items() if size is not None})


def check_dropout(p: Any) -> None:
    """Raise ValueError unless p is a probability."""
    if not hasattr(p, "__float__") or not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout must be between 0 and 1, got {p}")
