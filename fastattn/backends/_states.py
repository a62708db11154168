"""merge_states for every backend with kernels, which take at most four dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions

__all__ = ["operators", "sizes"]

# Calls a kernel with outputs and lse in turn, and returns new tensors.
Run = Callable[..., tuple[Tensor, ...]]


def operators(forward: Run, backward: Run) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``merge_states`` and ``merge_states_backward`` on these kernels."""

    def merge_states(
        out_a: Tensor,  # [..., L, Dv]
        lse_a: Tensor,  # [..., L] float32 or float64
        out_b: Tensor,  # [..., L, Dv]
        lse_b: Tensor,  # [..., L]
        *,
        options: NoOptions,
    ) -> tuple[Tensor, ...]:
        """Return ``(out, lse)``, see ``docs/design.md``."""
        states = (out_a, lse_a, out_b, lse_b)
        return _of_any_rank(forward, states, states)

    def merge_states_backward(
        grad_out: Tensor | None,  # [..., L, Dv]
        grad_lse: Tensor | None,  # [..., L]
        out_a: Tensor,
        lse_a: Tensor,
        out_b: Tensor,
        lse_b: Tensor,
        *,
        options: NoOptions,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of out_a, lse_a, out_b and lse_b, see ``docs/design.md``."""
        states = (out_a, lse_a, out_b, lse_b)
        return _of_any_rank(backward, (grad_out, grad_lse, *states), states)

    return merge_states, merge_states_backward


def _of_any_rank(
    run: Run, tensors: Sequence[Tensor | None], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The results in the shapes and the memory order of these tensors."""
    if like[0].ndim <= 4:
        return run(*tensors)
    # Views where their memory allows it, else copies.
    results = run(*(x if x is None else x.flatten(0, n % 2 - 4) for n, x in enumerate(tensors)))
    shaped = []
    for result, x in zip(results, like, strict=False):
        made, result = torch.empty_like(x), result.view(x.shape)
        shaped.append(result if result.stride() == made.stride() else made.copy_(result))
    return tuple(shaped)


def sizes(out: Tensor) -> tuple[int, ...]:
    """B, H, L and Dv."""
    return (1,) * (4 - out.ndim) + out.shape
