"""The fast path: a plain call on plain CPU tensors goes directly to its native kernel.

With 8 heads, 16 rows and head dimension 64, half of the time of PyTorch's own attention is not
arithmetic, and the general path (``prepare``, ``library.Operator``) takes even longer to find that
no option was given. At the size of the bAbI tasks, 32 queries on 50 rows of width 20, it doubles
the time of memory hops. An operator with a fast path checks its own arguments first;
:func:`calls_are_open` is the guard that all of them share, and every line of it was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn.eager import LOW, has_plain_memory, nothing_watches

__all__ = ["BACKENDS", "Native", "are_plain", "calls_are_open", "differentiable", "is_open"]

BACKENDS = ("", "cpu")  # with no backend forced, or the one that the fast path leads to


def calls_are_open() -> bool:
    """Whether no mode, transform, autocast or other backend has to see the calls made now."""
    return nothing_watches() and dispatch.forced.get() in BACKENDS and not compat.any_autocast()


def is_open(*tensors: Any) -> bool:
    """Whether calls are open, and these are plain tensors of the CPU (or None)."""
    return calls_are_open() and are_plain(*tensors)


def are_plain(*tensors: Any) -> bool:
    """Whether these are plain tensors of the CPU (or None).

    A tensor without memory (sparse, an undefined zero gradient, wrapped by a transform that has
    ended) and a lazy negation need the general path, which handles them or raises the error.
    """
    try:
        for t in tensors:
            if t is not None and (
                type(t) is not Tensor
                or not t.is_cpu
                or t.is_neg()
                or (not t.data_ptr() and t.numel())
            ):
                return False
    except RuntimeError:  # data_ptr() raises where there is no address
        return False
    return True


class Native:
    """The native backend of one operator's plain calls.

    A backend with a fast path named ``kernel`` has ``<kernel>_call(*tensors, ...) -> int``, which
    looks at the arguments of a call once: 0 if the general path has to see it, else a number that
    is the same for calls that the same backend can run, and odd if a tensor requires a gradient.
    """

    def __init__(self, kernel: str, operator: Any) -> None:
        self._kernel, self._operator = kernel, operator
        self.found: dict[int, tuple[str, Any]] = {}  # odd number -> the backend and its module
        self.call: Callable[..., int] = self._first_call
        evidence.on_change(self.found.clear)

    def _first_call(self, query: Any, *rest: Any) -> int:
        if not isinstance(query, Tensor) or not query.is_cpu:  # loads nothing
            return 0
        name, *_ = dispatch.PRIORITY["cpu"]
        self.call = getattr(dispatch.load(name), f"{self._kernel}_call", lambda *call: 0)
        return self.call(query, *rest)

    def find(self, number: int, *args: Any) -> tuple[str, Any] | None:
        """The backend and its module for these arguments of the operator, None: no fast path."""
        backend = self._operator.choose(args)
        module: Any = dispatch.load(backend)
        if not hasattr(module, self._kernel):
            return None
        self.found[number] = backend, module
        return self.found[number]


def differentiable(kernel: str, first_saved: int, resume: Callable[..., Any]) -> Any:
    """Return the differentiable fast path ``f(x, y, z, mask, a, b, backend, module) -> output``.

    A backend with a fast path has ``kernel(x, y, z, mask, a, b, differentiable) -> results``, with
    the output first, and ``<kernel>_backward(grad_out, *saved, a, b, wants)``, the gradients of x,
    y and z; ``saved`` are the tensors and ``results[first_saved:]``, and ``wants`` tells for each
    argument of f whether its gradient is wanted. ``resume(ctx, grad_out, saved, a, b, backend)``
    computes them on the general path: for a second derivative, if a mode or transform has become
    active since, or if the kernel returns None. All of them take more tensors at the end, or None
    for them, and the backward functions return the gradients of the first ones, too, unless they
    are not wanted.
    """
    kernel_backward = f"{kernel}_backward"

    def forward(
        ctx: Any,
        x: Any,
        y: Any,
        z: Any,
        mask: Any,
        a: Any,
        b: Any,
        backend: str,
        module: Any,
        *more: Tensor | None,
    ) -> Tensor:
        results = getattr(module, kernel)(x, y, z, mask, a, b, True, *more)
        ctx.save_for_backward(*more, x, y, z, mask, *results[first_saved:])
        ctx.set_materialize_grads(False)
        ctx.call = a, b, backend, module
        return results[0]

    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad
        if grad_out is None:
            return (None,) * len(wants)
        a, b, backend, module = ctx.call
        tensors, count = ctx.saved_tensors, len(wants) - 8
        more, saved = tensors[:count], tensors[count:]
        grads = None
        if (
            type(grad_out) is Tensor
            and not torch.is_grad_enabled()
            and nothing_watches()
            and has_plain_memory(grad_out)
            and all(t is None or t.data_ptr() >= LOW for t in saved)  # not freed since
        ):
            grads = getattr(module, kernel_backward)(grad_out, *saved, a, b, wants, *more)
        if grads is None:
            ctx.eager = True
            grads = resume(ctx, grad_out, saved, a, b, backend, *more)
        x, y, z, *of_more = grads
        return (
            x if wants[0] else None,
            y if wants[1] else None,
            z if wants[2] else None,
            None,
            None,
            None,
            None,
            None,
            *of_more,
            *(None,) * (count - len(of_more)),
        )

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(kernel, (compat.SingleLevelFunction,), methods)
    return function.apply
