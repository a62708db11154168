"""Measures the time that a model spends in attention, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn.bench.stopwatch import Stopwatch

Attention = Callable[..., tuple[Tensor, Tensor | None]]


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


def watched(attention: Attention, watch: Stopwatch) -> Attention:
    """The attention function of transformers, with its forward and backward timed."""

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
    """Within the block, the attention function registered under this name is timed."""
    from transformers import AttentionInterface

    if implementation == "eager":  # each model has its own, which is in no registry
        yield
        return
    registered = AttentionInterface()[implementation]
    AttentionInterface.register(implementation, watched(registered, watch))
    try:
        yield
    finally:
        AttentionInterface.register(implementation, registered)
