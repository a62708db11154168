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


def _timed(attend: Callable[..., Any], watch: Stopwatch, *tensors: Tensor) -> Any:
    """Calls attention on query, key and value, and times its forward and backward.

    The result is the output, or a tuple that begins with it. In the backward, the mark on the
    output comes before attention, and those on its inputs after it.
    """
    has_backward = torch.is_grad_enabled() and tensors[0].requires_grad
    if has_backward:
        tensors = _Mark.apply(watch.stop, *tensors)
    watch.start()
    result = attend(*tensors)
    watch.stop()
    if not has_backward:
        return result
    if isinstance(result, tuple):
        return *_Mark.apply(watch.start, result[0]), *result[1:]
    return _Mark.apply(watch.start, result)[0]


@contextlib.contextmanager
def watching(
    function: Callable[..., Any],
    replace: Callable[[Any], object],
    watch: Stopwatch,
    before: int = 0,
) -> Iterator[None]:
    """Within the block, a function of query, key and value is timed.

    `replace` puts another function in its place; `before` arguments come before the query.
    """

    def watched(*args: Any, **options: Any) -> Any:
        def attend(*tensors: Tensor) -> Any:
            return function(*args[:before], *tensors, *args[before + 3 :], **options)

        return _timed(attend, watch, *args[before : before + 3])

    replace(watched)
    try:
        yield
    finally:
        replace(function)
