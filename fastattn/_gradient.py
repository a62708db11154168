"""The autograd functions of an operator: they save tensors and call its backward operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._derivative import Derivative, is_placeholder
from fastattn.compat import is_unintercepted

if TYPE_CHECKING:
    from fastattn.library import Operator


class _Context(NamedTuple):
    """The context that :meth:`Gradient.derive` reads for a call of a plan, see fastattn.call."""

    saved_tensors: Sequence[Any]
    options: Any
    needs_input_grad: Sequence[bool]
    backend: str = "cpu"
    eager: bool = True


class Gradient:
    """The derivative of an operator, whose tensors have places here instead of names.

    Four functions pick elements of a tuple, in C. ``_pick_saved``: the tensors to save, of all
    tensors and results. ``_pick_taken``: the gradients that the backward operator takes, of all
    results. ``_arrange``: the gradients of all arguments but the backend, of its results and None.
    ``_pick_needed``: the flags of skippable gradients, of ``needs_input_grad``.
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
        self._pick_needed: Any = None
        self._constants: list[int] = []  # the places of results without a gradient
        # For each tensor with a gradient, its place among the saved tensors.
        self._places: dict[int, int] = {}
        if derivative is None:
            everything = itemgetter(slice(None))
            self._pick_saved = itemgetter(slice(0 if formula else len(names)))
            self._pick_taken = self._arrange = everything
            return
        grads, reads, gives = (
            text.split() for text in (derivative.grads, derivative.reads, derivative.gives)
        )
        saveable, none = [*names, *results], len(gives)
        self._saved = [saveable.index(name) for name in reads]
        self._pick_saved = _picker(self._saved)
        self._pick_taken = _picker([results.index(name) for name in grads])
        places = [gives.index(name) if name in gives else none for name in names]
        self._arrange = _picker([*places, none])
        self._places = {names.index(name): reads.index(name) for name in gives if name in reads}
        self._constants = [n for n, name in enumerate(results) if name not in grads]
        if skippable := derivative.skippable():
            self._pick_needed = _picker([names.index(name) for name in skippable])

    def function(self, forward: Callable[..., Any], eager: bool) -> Any:
        """Return the function that runs ``forward`` and saves the inputs of the backward pass.

        ``eager``: no tensor is wrapped by a mode or transform. The forward of the class takes the
        context, which is much faster than ``setup_context``. The class is single-level:
        ``torch.func`` reaches it only inside the dispatcher, one level at a time.
        """

        def forward_and_save(ctx: Any, *args: Any) -> Any:
            results = forward(*args)
            self.save(ctx, args, results, eager)
            return results

        return _function(self._operator.name, forward_and_save, self.derive)

    def function_of_plans(self, first: bool) -> Any:
        """Return the function that plans call, on the CPU's kernels; ``first``: for one result."""
        derivative, operator = self._derivative, self._operator
        if derivative is None:
            return None
        keeps, save, derive = self.native_passes()
        name, load, several = operator.name, dispatch.load, operator.returns > 1
        take, of_call = self._pick_taken, derivative.of_call
        constants = [] if first else self._constants
        returns = 1 if first else operator.returns
        other_grads = (None,) * (operator.returns - returns)  # of results that are not returned

        def forward(ctx: Any, *args: Any) -> Any:
            *tensors, options = args
            results = getattr(load("cpu"), name)(*tensors, options=options, **keeps)
            if not several:
                results = (results,)
            ctx.set_materialize_grads(False)
            ctx.options = options if of_call is None else of_call(*args)
            ctx.save_for_backward(*save((*tensors, *results)))
            if constants:
                ctx.mark_non_differentiable(*(results[n] for n in constants))
            return results[0] if returns == 1 else results[:returns]

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            grads = (*grads, *other_grads)
            taken = take(grads)
            if torch.is_grad_enabled() or not _can_run_natively(*taken) or not _is_any(taken):
                context = _Context(ctx.saved_tensors, ctx.options, ctx.needs_input_grad)
                return self.derive(context, *grads)
            return derive(ctx.saved_tensors, ctx.options, ctx.needs_input_grad, taken)

        return _function(operator.name, forward, backward)

    def native_passes(self) -> tuple[dict[str, bool], Callable[..., Any], Callable[..., Any]]:
        """Return what both passes need on the CPU's kernels: ``keeps, save, derive``.

        ``keeps``: further options of the forward kernel. ``save``: (its tensors and results) -> the
        tensors to save. ``derive``: (saved tensors, options, which arguments need a gradient,
        gradients of the results) -> gradients of the arguments. They call few Python functions,
        whose overhead is visible between the kernels of a training step.
        """
        operator, derivative, load = self._operator, self._derivative, dispatch.load
        assert derivative is not None
        save, arrange, options_of = self._pick_saved, self._arrange, self._options_of_backward
        name, keeps = operator.backward.name, {"keeps": True} if derivative.keeps else {}
        if keeps:  # the extra results follow all others
            begin = len(operator.names) + operator.returns
            save = _picker([*self._saved, *range(begin, begin + len(derivative.keeps.split()))])

        def derive(saved: Sequence[Any], options: Any, needs: Sequence[bool], grads: Any) -> Any:
            options, kernel = options_of(options, needs), getattr(load("cpu"), name)
            return arrange((*kernel(*grads, *saved, options=options), None))

        return keeps, save, derive

    def save(self, ctx: Any, args: Sequence[Any], results: Any, eager: bool) -> None:
        """Save in the context the values that :meth:`derive` needs."""
        *tensors, ctx.options, ctx.backend = args
        ctx.eager = eager
        ctx.set_materialize_grads(False)
        all_results = (results,) if self._operator.returns == 1 else results
        ctx.save_for_backward(*self._pick_saved((*tensors, *all_results)))
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
        grads = self._pick_taken(grads)
        if not _is_any(grads):
            return (None,) * len(needs)
        if self._formula is not None:
            return self._formula(options, *grads), *[None] * (len(needs) - 1)
        if self._derivative is None:
            return self._operator.backward_through_reference(ctx, *grads)
        options = self._options_of_backward(options, needs)
        saved = (*ctx.saved_tensors[: len(self._saved)], options, ctx.backend)
        results = self._operator.backward.resume(ctx, grads, saved)
        gradients = (*self._arrange((*results, None)), None)  # the backend has no gradient
        return tuple(
            None
            if not need
            else x
            if n not in self._places
            else _reshaped(x, saved[self._places[n]])
            for n, (x, need) in enumerate(zip(gradients, needs, strict=False))
        )

    def recompute(self, saved: Sequence[Any], options: Any) -> Tensor:
        """Compute the first result again with a gradient, from the tensors that were saved."""
        operator = self._operator
        tensors = [saved[self._saved.index(n)] for n in range(len(operator.names))]
        result: Tensor = operator.dispatched(*operator.lifted(tensors), options, "cpu")[0]
        return result

    def _options_of_backward(self, options: Any, needs: Sequence[bool]) -> Any:
        if self._derivative is None or self._pick_needed is None:
            return options
        needed = self._pick_needed(needs)
        try:
            return options.of_backward[needed]
        except (AttributeError, KeyError):
            record = self._derivative.backward_options(options, needed)
            object.__setattr__(options, "of_backward", {needed: record})  # a frozen class
            return record


def in_one_node(first: Gradient, then: Gradient) -> Any:
    """The function for the plans of two operators: ``then`` reads the first result of ``first``.

    It takes the other tensors of ``then``, the tensors of ``first``, and the options of both; it
    returns the first result of ``then``. A second autograd node would take as long as a small
    kernel.
    """
    keeps, save, derive = first.native_passes()
    _, then_save, then_derive = then.native_passes()
    name, then_name, load = first._operator.name, then._operator.name, dispatch.load
    others = len(then._operator.names) - 1  # the number of its other tensors
    # The gradients of all results but the first, and which of these the backward takes.
    none, then_none = ((None,) * (x._operator.returns - 1) for x in (first, then))
    taken_none = first._pick_taken((None, *none))[1:]
    then_taken_none = then._pick_taken((None, *then_none))[1:]

    def forward(ctx: Any, *args: Any) -> Any:
        tensors, (options, then_options) = args[others:-2], args[-2:]
        results = getattr(load("cpu"), name)(*tensors, options=options, **keeps)
        saved, tensors = save((*tensors, *results)), (results[0], *args[:others])
        results = getattr(load("cpu"), then_name)(*tensors, options=then_options)
        then_saved = then_save((*tensors, *results))
        ctx.set_materialize_grads(False)
        ctx.options, ctx.saved_by_first = args[-2:], len(saved)
        ctx.save_for_backward(*saved, *then_saved)
        return results[0]

    def backward(ctx: Any, grad: Tensor | None) -> Any:
        needs, (options, then_options) = ctx.needs_input_grad, ctx.options
        if grad is None:
            return (None,) * len(needs)
        needs, then_needs = needs[others:-1], (True, *needs[:others], False)
        saved = ctx.saved_tensors
        saved, then_saved = saved[: ctx.saved_by_first], saved[ctx.saved_by_first :]
        if torch.is_grad_enabled() or not _can_run_natively(grad):
            if torch.is_grad_enabled():  # the first operator runs again, to be differentiated
                result = first.recompute(saved, options).view_as(then_saved[0])
                then_saved = (result, *then_saved[1:])
            context = _Context(then_saved, then_options, then_needs)
            grad, *then_grads = then.derive(context, grad, *then_none)
            first_grads = first.derive(_Context(saved, options, needs), grad, *none)
        else:
            grads = (grad, *then_taken_none)
            grad, *then_grads = then_derive(then_saved, then_options, then_needs, grads)
            first_grads = derive(saved, options, needs, (grad, *taken_none))
        return *then_grads[:others], *first_grads, None

    return _function(then_name, forward, backward)


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (compat.SingleLevelFunction,), methods).apply  # type: ignore[attr-defined]


def _can_run_natively(*grads: Tensor | None) -> Any:
    return is_unintercepted() and dispatch.load("cpu").are_plain(*grads)  # type: ignore[union-attr]


def _reshaped(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """A gradient in the dimensions of its tensor, of which a plan may have more or fewer."""
    if grad is None or x is None or grad.dim() == x.dim():
        return grad
    return grad.reshape(x.shape)


def _is_any(grads: Sequence[Tensor | None]) -> bool:
    return any([grad is not None for grad in grads])  # noqa: C419  (faster)


def _picker(places: list[int]) -> Any:
    """A function that returns these elements of a tuple as a tuple."""
    if len(places) == 1:  # itemgetter(n) returns the element itself
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)
