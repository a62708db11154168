"""What the adapters of merge_states share: results, and all tensors in the rank of the kernels.

Groups of tensors are outputs [..., L, Dv] and lse [..., L] in turn. The kernels take [B, H, L, Dv]
and [B, H, L, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["merged", "merged_backward", "operands", "sizes"]

Group = Sequence[Tensor | None]


def merged(run: Callable[..., None], *states: Tensor) -> tuple[Tensor, ...]:
    """Return ``(out, lse)``, which ``run(states, results)`` writes."""
    return _written(run, (states,), states[:2])


def merged_backward(run: Callable[..., None], given: Group, *states: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of ``states``, which ``run(given, states, results)`` writes."""
    return _written(run, (given, states), states)


def _written(
    run: Callable[..., None], groups: Sequence[Group], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = tuple([torch.empty_like(x) for x in like])
    if like[0].ndim <= 4:
        run(*groups, results)
        return results
    targets = _flattened(results)
    run(*map(_flattened, groups), targets)
    for result, target in zip(results, targets, strict=True):
        if target.data_ptr() != result.data_ptr():
            result.copy_(target.view(result.shape))
    return results


def _flattened(group: Group) -> tuple[Any, ...]:
    """At most four dimensions: views where their memory allows it, else copies."""
    return tuple(x if x is None else x.flatten(0, n % 2 - 4) for n, x in enumerate(group))


def sizes(out: Tensor) -> tuple[int, ...]:
    """B, H, L and Dv."""
    return (1,) * (4 - out.ndim) + out.shape


def operands(group: Group) -> tuple[tuple[int, tuple[int, ...]] | None, ...]:
    """Addresses and the four strides of the kernels, for the native modules."""
    # From a list, which takes less time than a generator.
    return tuple(
        [
            None if x is None else (x.data_ptr(), _strides(x.stride() + (1,) * (n % 2)))
            for n, x in enumerate(group)
        ]
    )


def _strides(own: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * (4 - len(own)) + own
