"""Batched gradients: runs PyTorch's legacy ``vmap`` as ``torch.vmap``; also empty batches.

``torch.autograd.grad(..., is_grads_batched=True)``, ``torch.autograd.functional.jacobian`` and
``hessian`` with ``vectorize=True``, and ``gradcheck(check_batched_grad=True)`` run the autograd
engine in PyTorch's legacy ``vmap``. It passes batched tensors without memory to the backward
functions. They differ from the batched tensors of ``torch.func``, whose transforms do not support
them.

Forward functions never get such tensors: the forward ran before, or, in forward mode, only the
tangents are batched. So only the backward functions need a check. :func:`through_torch_vmap`
converts the legacy ``vmap`` into ``torch.vmap`` around their calls. The rest works as with
``torch.func``: through the dispatcher, to the batching rule of each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn.compat import is_first_vmap, with_vmap_level, without_vmap_level

if TYPE_CHECKING:
    from fastattn.library import Operator

_MAX_LEVELS = 64  # the maximum nesting of vmaps


def through_torch_vmap(
    function: Callable[..., Sequence[Tensor]], grads: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Return ``function(*grads)``, where any of the gradients may be batched."""
    if torch.compiler.is_compiling():  # a compiled backward has no batched gradients
        return function(*grads)
    levels: list[int] = []
    for level in range(1, _MAX_LEVELS + 1):
        if not any(grad is not None and is_first_vmap(grad) for grad in grads):
            break
        # The gradients with their hidden dimension of this level in front; None for all others.
        unwrapped = [
            without_vmap_level(grad, level) if grad is not None and is_first_vmap(grad) else None
            for grad in grads
        ]
        if any(x is not None for x in unwrapped):
            dims = tuple(None if x is None else 0 for x in unwrapped)
            function = torch.vmap(function, in_dims=dims)
            grads = [old if new is None else new for old, new in zip(grads, unwrapped, strict=True)]
            levels.append(level)
    results = function(*grads)
    # The last level's dimension comes first, but levels must be added in increasing order.
    for dim, level in zip(reversed(range(len(levels))), levels, strict=True):
        results = [with_vmap_level(x, dim, level) for x in results]
    return results


def rule_for_any_size(
    rule: Callable[..., Any], fake: Callable[..., Any], returns: int
) -> Callable[..., Any]:
    """A batching rule for any number of examples, made from a rule for at least one example.

    ``fake`` makes the ``returns`` results of one example, with the right shapes and any values.
    """

    def rule_or_fake(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        if info.batch_size:
            return rule(info, in_dims, *args)
        pairs = zip(args, in_dims, strict=True)
        example = [x if d is None else x.new_empty(x.movedim(d, 0).shape[1:]) for x, d in pairs]
        results = fake(*example)
        if returns == 1:
            return results.new_empty((0, *results.shape)), 0
        return tuple(x.new_empty((0, *x.shape)) for x in results), (0,) * returns

    return rule_or_fake


# --- helpers for the batching rules of the operators ----------------------------------------------


def size_of_batch(x: Tensor, mapped: int | None) -> int:
    """B of a tensor [B, ...], beside its dimension ``mapped``, if it has one."""
    return x.shape[1 if mapped == 0 else 0]


def fold(x: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """[B, ...], maybe with a mapped dimension ``dim`` of size n at any position -> [n * B, ...]."""
    if x is None or (dim is None and x.shape[0] == 1 != batch):  # all examples broadcast it
        return x
    x = x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    if x.shape[1] != batch:  # a mask shared by the batch
        x = x.expand(n, batch, *x.shape[2:])
    return x.flatten(0, 1)


def unfold(x: Tensor, n: int) -> Tensor:
    """[n * B, ...] -> [n, B, ...]."""
    return x.unflatten(0, (n, x.shape[0] // n))


def one_by_one(
    operator: Operator, n: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """A batching rule that calls the operator once per example."""
    *tensors, options, backend = args

    def example(i: int) -> list[Any]:
        return [
            arg if dim is None else arg.select(dim, i)
            for arg, dim in zip(tensors, in_dims, strict=True)
        ]

    results = [operator.dispatched(*example(i), options, backend) for i in range(n)]
    if operator.returns == 1:
        return torch.stack(results), 0
    stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
