"""merge_states for every backend with kernels: results, and all tensors in the rank of the kernels.

The kernels take outputs [B, H, L, Dv] and lse [B, H, L, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions

__all__ = ["flattened", "named_operands", "operators", "sizes"]

# Outputs and lse in turn.
_STATES = ("out_a", "lse_a", "out_b", "lse_b")
_FORWARD = (*_STATES, "out", "lse")
_BACKWARD = ("grad_out", "grad_lse", *_STATES, *(f"grad_{name}" for name in _STATES))

# Calls a kernel with all its tensors, by name; one that is not given is None.
Run = Callable[[dict[str, Any]], None]


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
        return _written(forward, _FORWARD, states, states[:2])

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
        return _written(backward, _BACKWARD, (grad_out, grad_lse, *states), states)

    return merge_states, merge_states_backward


def _written(
    run: Run, names: Sequence[str], read: Sequence[Tensor | None], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = tuple([torch.empty_like(x) for x in like])
    if like[0].ndim <= 4:
        run(dict(zip(names, (*read, *results), strict=True)))
        return results
    targets = flattened(results)
    run(dict(zip(names, (*flattened(read), *targets), strict=True)))
    for result, target in zip(results, targets, strict=True):
        if target.data_ptr() != result.data_ptr():
            result.copy_(target.view(result.shape))
    return results


def flattened(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """At most four dimensions: views where their memory allows it, else copies."""
    return tuple(x if x is None else x.flatten(0, n % 2 - 4) for n, x in enumerate(tensors))


def sizes(out: Tensor) -> tuple[int, ...]:
    """B, H, L and Dv."""
    return (1,) * (4 - out.ndim) + out.shape


def named_operands(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Addresses and the four strides of the kernels, for the native modules."""
    return {
        name: None if x is None else (x.data_ptr(), _strides(x.stride() + (1,) * (n % 2)))
        for n, (name, x) in enumerate(tensors.items())
    }


def _strides(own: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * (4 - len(own)) + own
