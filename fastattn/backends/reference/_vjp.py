"""The derivative of a definition: its vector-Jacobian product, which is differentiable again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradients"]


def gradients(
    forward: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Tensor | None],
    wanted: Iterable[int],
    grads: Sequence[Tensor | None],
) -> Any:
    """Return a gradient for each argument of ``forward``, None for an argument not in ``wanted``.

    ``grads`` are the gradients of the results, None for a result without a gradient.
    """
    places = [n for n in wanted if arguments[n] is not None]
    leaves = [x for n in places if (x := arguments[n]) is not None]
    given = [n for n, grad in enumerate(grads) if grad is not None]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        filled = list(arguments)
        for n, leaf in zip(places, leaves, strict=True):
            filled[n] = leaf
        results = forward(*filled)
        return tuple(results[n] for n in given)

    found: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if given and leaves:
        found = torch.func.vjp(function, *leaves)[1](tuple(grads[n] for n in given))
    result: list[Tensor | None] = [None] * len(arguments)
    for n, gradient in zip(places, found, strict=True):
        result[n] = gradient
    return tuple(result)
