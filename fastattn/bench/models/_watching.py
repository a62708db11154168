"""The time that a model spends in its attention function, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.stopwatch import Stopwatch

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class _StartsBackward(torch.autograd.Function):
    """The identity; its gradient is the first that the backward of attention needs."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, x: Tensor) -> Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.start()
        return None, *grads


class _StopsBackward(torch.autograd.Function):
    """The identity of query, key and value; its gradients are all that attention's backward has."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watch = watch
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.stop()
        return None, *grads


def watched(attention: Attention, watch: Stopwatch) -> Attention:
    """An attention function of transformers, its forward and its backward timed."""

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        has_backward = torch.is_grad_enabled() and query.requires_grad
        if has_backward:
            query, key, value = _StopsBackward.apply(watch, query, key, value)
        watch.start()
        out, weights = attention(module, query, key, value, *args, **options)
        watch.stop()
        return (_StartsBackward.apply(watch, out) if has_backward else out), weights

    return forward


@contextlib.contextmanager
def watching(implementation: str, watch: Stopwatch) -> Iterator[None]:
    """While entered, the attention function that is registered under this name is timed."""
    from transformers import AttentionInterface

    if implementation == "eager":  # of each model its own, and in no registry
        yield
        return
    registered = AttentionInterface()[implementation]
    AttentionInterface.register(implementation, watched(registered, watch))
    try:
        yield
    finally:
        AttentionInterface.register(implementation, registered)
