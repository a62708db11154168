"""The autograd functions of an operator: what they save, how they reach its backward operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._derivative import Derivative, is_placeholder
from fastattn.eager import nothing_watches

if TYPE_CHECKING:
    from fastattn.library import Operator

__all__ = ["Gradient"]


class Gradient:
    """The derivative of an operator, by places instead of names.

    Three functions pick from a tuple, in C. ``_save``: the tensors to save, from all tensors and
    results. ``_take``: the arguments of the backward operator, from the gradients of all results.
    ``_arrange``: the gradients of all arguments but the backend, from its results and None.
    """

    def __init__(
        self,
        operator: Operator,
        derivative: Derivative | None,
        formula: Callable[..., Any] | None,
    ) -> None:
        self._operator, self._derivative, self._formula = operator, derivative, formula
        names, results, record = operator.names, operator.results, operator.options
        self._placeholders = [(n, x) for n, x in enumerate(results) if hasattr(record, x)]
        self._flags: Any = None
        self._constants: list[int] = []  # the results without a gradient
        # Of each tensor with a gradient, its place among those saved.
        self._places: dict[int, int] = {}
        if derivative is None:
            everything = itemgetter(slice(None))
            self._save = itemgetter(slice(0 if formula else len(names)))
            self._take = self._arrange = everything
            return
        grads, reads, gives = (
            text.split() for text in (derivative.grads, derivative.reads, derivative.gives)
        )
        known, none = [*names, *results], len(gives)
        self._saved = [known.index(name) for name in reads]
        self._save = _picker(self._saved)
        self._take = _picker([results.index(name) for name in grads])
        places = [gives.index(name) if name in gives else none for name in names]
        self._arrange = _picker([*places, none])
        self._places = {names.index(name): reads.index(name) for name in gives if name in reads}
        self._constants = [n for n, name in enumerate(results) if name not in grads]
        if flags := derivative.flags():
            self._flags = _picker([names.index(name) for name in flags])

    def function(self, forward: Callable[..., Any], eager: bool) -> Any:
        """Return the function that runs ``forward`` and keeps what the backward pass needs.

        ``eager``: it gets plain tensors. The forward of the class takes the context, which is three
        times as fast as ``setup_context``. The class is single-level: ``torch.func`` reaches it
        only inside the dispatcher, one level at a time.
        """

        def forward_and_keep(ctx: Any, *args: Any) -> Any:
            results = forward(*args)
            self.keep(ctx, args, results, eager)
            return results

        return _function(self._operator.name, forward_and_keep, self.derive)

    def function_of_plans(self, first: bool) -> Any:
        """The same for plans, on the CPU's kernels; ``first``: it returns the first result alone.

        It calls few functions of Python: between the kernels of a training step each takes a
        microsecond, and so does each result.
        """
        derivative, operator = self._derivative, self._operator
        if derivative is None:
            return None
        save, take, arrange, load = self._save, self._take, self._arrange, dispatch.load
        forward_name, backward_name = operator.name, operator.backward.name
        of_call, constants = derivative.of_call, [] if first else self._constants
        several, none = operator.returns > 1, (None,) * (operator.returns - 1)
        missing = take((None, *none))[1:]
        kept, keeps = derivative.keeps.split(), {"keeps": True} if derivative.keeps else {}
        read, last = len(self._saved), len(operator.names) + operator.returns
        if keeps:  # the last of the results
            save = _picker([*self._saved, *range(last, last + len(kept))])

        def forward(ctx: Any, *args: Any) -> Any:
            *tensors, options = args
            results = getattr(load("cpu"), forward_name)(*tensors, options=options, **keeps)
            ctx.set_materialize_grads(False)
            ctx.options, ctx.backend, ctx.eager = options, "cpu", True
            if of_call is not None:
                ctx.options = of_call(*args)
            ctx.save_for_backward(*save((*tensors, *results) if several else args))
            if constants:
                ctx.mark_non_differentiable(*(results[n] for n in constants))
            if first and several:
                return results[0]
            return results[: operator.returns] if keeps else results

        def runs_natively(*grads: Tensor | None) -> Any:
            return nothing_watches() and load("cpu").are_plain(*grads)  # type: ignore[union-attr]

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            taken = take(grads)
            if torch.is_grad_enabled() or not runs_natively(*taken) or not _any(taken):
                return self.derive(ctx, *grads)
            return derived(ctx, *taken)

        def backward_of_first(ctx: Any, grad: Tensor | None) -> Any:
            if grad is None or torch.is_grad_enabled() or not runs_natively(grad):
                return self.derive(ctx, grad, *none)
            return derived(ctx, grad, *missing)

        def derived(ctx: Any, *grads: Tensor | None) -> Any:
            options = self._options_of_backward(ctx.options, ctx.needs_input_grad)
            saved, kernel = ctx.saved_tensors, getattr(load("cpu"), backward_name)
            if keeps:
                more = dict(zip(kept, saved[read:], strict=True))
                return arrange((*kernel(*grads, *saved[:read], options=options, **more), None))
            return arrange((*kernel(*grads, *saved, options=options), None))

        return _function(operator.name, forward, backward_of_first if first else backward)

    def keep(self, ctx: Any, args: Sequence[Any], results: Any, eager: bool) -> None:
        """Keep in the context what :meth:`derive` needs."""
        *tensors, ctx.options, ctx.backend = args
        ctx.eager = eager
        ctx.set_materialize_grads(False)
        several = (results,) if self._operator.returns == 1 else results
        ctx.save_for_backward(*self._save((*tensors, *several)))
        if self._derivative is not None and self._derivative.of_call is not None:
            ctx.options = self._derivative.of_call(*tensors, ctx.options)
        if self._constants:
            ctx.mark_non_differentiable(*(results[n] for n in self._constants))

    def derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the arguments."""
        options, needs = ctx.options, ctx.needs_input_grad
        for n, name in self._placeholders:
            if is_placeholder(name, options):
                grads = (*grads[:n], None, *grads[n + 1 :])
        grads = self._take(grads)
        if not _any(grads):
            return (None,) * len(needs)
        if self._formula is not None:
            return self._formula(options, *grads), *[None] * (len(needs) - 1)
        if self._derivative is None:
            return self._operator.backward_through_reference(ctx, *grads)
        options = self._options_of_backward(options, needs)
        seen = (*ctx.saved_tensors[: len(self._saved)], options, ctx.backend)
        found = self._operator.backward.resume(ctx, grads, seen)
        gradients = (*self._arrange((*found, None)), None)  # none of the backend
        return tuple(
            None if not need else x if n not in self._places else _like(x, seen[self._places[n]])
            for n, (x, need) in enumerate(zip(gradients, needs, strict=False))
        )

    def _options_of_backward(self, options: Any, needs: Sequence[bool]) -> Any:
        if self._derivative is None or self._flags is None:
            return options
        wanted = self._flags(needs)
        try:
            return options.of_backward[wanted]
        except (AttributeError, KeyError):
            made = self._derivative.options_for(options, wanted)
            object.__setattr__(options, "of_backward", {wanted: made})  # it is frozen
            return made


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (compat.SingleLevelFunction,), methods).apply  # type: ignore[attr-defined]


def _like(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """A gradient in the dimensions of the tensor of a plan."""
    if grad is None or x is None or grad.dim() == x.dim():
        return grad
    return grad.reshape(x.shape)


def _any(grads: Sequence[Tensor | None]) -> bool:
    return any([grad is not None for grad in grads])  # noqa: C419  (faster)


def _picker(places: list[int]) -> Any:
    """A function that returns these elements of a tuple as a tuple."""
    if len(places) == 1:  # itemgetter(n) returns the element itself
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)
