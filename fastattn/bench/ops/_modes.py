"""Modes of PyTorch, which intercept the functions and operators that run inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastattn import compat
from fastattn.backends import reference
from fastattn.library import operators


class Intercepting(TorchFunctionMode):
    """Calls `run(func, args, kwargs)` for a function of PyTorch or a dispatched one of fastattn."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


def defined(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the definition of a primitive, which PyTorch differentiates, in place of a kernel."""
    if (primitive := operators.get(func)) is None:
        return func(*args, **kwargs)
    tensors, options = primitive.split(args)
    return getattr(reference, primitive.name)(*tensors, options=options)


class NothingDrawn(compat.DispatchMode):
    """Fills new weights with 0 instead of random numbers, which is faster.

    Uninitialized memory does not work: `trunc_normal_` redraws until all numbers are in its range.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.normal_, torch.ops.aten.uniform_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))
