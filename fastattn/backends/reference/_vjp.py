"""The derivative of a definition: its vector-Jacobian product, which is differentiable again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import needs_gradient


def gradients(
    forward: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Tensor | None],
    needed: Iterable[int],
    grads: Sequence[Tensor | None],
) -> Any:
    """Return the gradient of each argument of ``forward``, None unless its index is ``needed``.

    ``grads`` are the gradients of the results, None for a result without a gradient.
    """
    indices = [n for n in needed if arguments[n] is not None]
    leaves = [x for n in indices if (x := arguments[n]) is not None]
    with_grad = [n for n, grad in enumerate(grads) if grad is not None]

    def forward_of_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
        """`forward` of the differentiated arguments, without results that have no gradient."""
        inputs = list(arguments)
        for n, leaf in zip(indices, leaves, strict=True):
            inputs[n] = leaf
        results = forward(*inputs)
        return tuple(results[n] for n in with_grad)

    vector_jacobian: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if with_grad and leaves:
        vector_jacobian = torch.func.vjp(forward_of_leaves, *leaves)[1](
            tuple(grads[n] for n in with_grad)
        )
    result: list[Tensor | None] = [None] * len(arguments)
    for n, gradient in zip(indices, vector_jacobian, strict=True):
        result[n] = gradient
    return tuple(result)


def backward_of(
    forward: Callable[..., Any], *, results: str, takes: str, gives: str
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Make the backward function of a definition.

    All three arguments are lists of names: the ``results`` of ``forward``; the tensors that the
    backward function ``takes``, in order; and the tensors whose gradients it ``gives``. It takes
    ``grad_<result>`` for each result, which may be None, and the tensors of ``forward``. It ignores
    results of ``forward``, which only kernels need. A gradient is None if its tensor is None, or if
    the options do not request it.
    """
    names = takes.split()
    forward_names = [p.name for p in _parameters(forward) if p.kind is not p.KEYWORD_ONLY]
    indices = {n: forward_names.index(name) for n, name in enumerate(gives.split())}

    def backward(*tensors: Tensor | None, options: Any) -> tuple[Tensor | None, ...]:
        """The gradients of ``gives``, from the tensors ``takes``."""
        named = dict(zip(names, tensors))  # noqa: B905  (optional ones at the end may be left out)
        grads = gradients(
            functools.partial(forward, options=options),
            [named.get(name) for name in forward_names],
            [i for n, i in indices.items() if needs_gradient(options, n, forward_names[i])],
            [named.get(f"grad_{name}") for name in results.split()],
        )
        return tuple(grads[i] for i in indices.values())

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
    ]
    options = [p for p in _parameters(forward) if p.kind is p.KEYWORD_ONLY]
    backward.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
    return backward


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    """The parameters of `function`, in order."""
    return inspect.signature(function).parameters.values()
