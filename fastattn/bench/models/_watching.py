"""Measures the time that a model spends in attention, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.stopwatch import Stopwatch


class _StartsBackward(torch.autograd.Function):
    """The identity on the output of attention; its backward runs before that of attention."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, x: Tensor) -> Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.start()
        return None, *grads


class _StopsBackward(torch.autograd.Function):
    """The identity on query, key and value; its backward runs after that of attention."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watch = watch
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.stop()
        return None, *grads


def _timed(attend: Callable[..., Any], watch: Stopwatch, *tensors: Tensor) -> Any:
    """Calls attention on query, key and value, and times its forward and backward.

    The result is the output, or a tuple that begins with it.
    """
    has_backward = torch.is_grad_enabled() and tensors[0].requires_grad
    if has_backward:
        tensors = _StopsBackward.apply(watch, *tensors)
    watch.start()
    result = attend(*tensors)
    watch.stop()
    if not has_backward:
        return result
    if isinstance(result, tuple):
        return _StartsBackward.apply(watch, result[0]), *result[1:]
    return _StartsBackward.apply(watch, result)


@contextlib.contextmanager
def watching_function(owner: Any, name: str, watch: Stopwatch) -> Iterator[None]:
    """Within the block, a function of query, key and value that `owner` has is timed."""
    function = getattr(owner, name)

    def watched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        def attend(*tensors: Tensor) -> Any:
            return function(*tensors, *args, **options)

        return _timed(attend, watch, query, key, value)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, function)


@contextlib.contextmanager
def watching_registry(implementation: str, watch: Stopwatch) -> Iterator[None]:
    """Within the block, the function that transformers has under this name is timed."""
    from transformers import AttentionInterface

    if implementation == "eager":  # each model has its own, which is in no registry
        yield
        return
    registered = AttentionInterface()[implementation]

    def watched(module: Any, *args: Any, **options: Any) -> Any:
        def attend(*tensors: Tensor) -> Any:
            return registered(module, *tensors, *args[3:], **options)

        return _timed(attend, watch, *args[:3])

    AttentionInterface.register(implementation, watched)
    try:
        yield
    finally:
        AttentionInterface.register(implementation, registered)
