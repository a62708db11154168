"""Measures the time that a model spends in attention, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.gauges import Stopwatch


class _Mark(torch.autograd.Function):
    """The identity; `then` is called in its backward."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.then()
        return None, *grads


@contextlib.contextmanager
def watching(
    function: Callable[..., Any],
    replace: Callable[[Any], object],
    watch: Stopwatch,
    before: int = 0,
) -> Iterator[None]:
    """Within the block, a function of query, key and value is timed, forward and backward.

    `replace` puts another function in its place; `before` arguments come before the query. The
    result is the output, or a tuple that begins with it. In the backward, the mark on the output
    comes before attention, and those on its inputs after it.
    """

    def watched(*args: Any, **options: Any) -> Any:
        tensors = args[before : before + 3]
        has_backward = torch.is_grad_enabled() and tensors[0].requires_grad
        if has_backward:
            tensors = _Mark.apply(watch.stop, *tensors)
        watch.start()
        result = function(*args[:before], *tensors, *args[before + 3 :], **options)
        watch.stop()
        if not has_backward:
            return result
        if isinstance(result, tuple):
            return *_Mark.apply(watch.start, result[0]), *result[1:]
        return _Mark.apply(watch.start, result)[0]

    replace(watched)
    try:
        yield
    finally:
        replace(function)
