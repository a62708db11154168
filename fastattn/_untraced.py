"""Functions that ``torch.compile`` must not trace: they exchange messages or inspect code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return the function with a graph break: the compiler does not trace into it.

    ``torch.compiler.disable`` imports the compiler, which takes seconds, so it is called only once
    the compiler is loaded.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(Function, call)
