"""Turns a primitive into a PyTorch operator: eager, autograd, ``torch.func``, the compiler.

An :class:`Operator` is declared once, by its primitive's tensors, their shapes, and the record of
its options (``fastattn.backends.primitives``):

    encode = Operator(
        "encode_memory",
        "tokens: R B N J; weight: R G V D; factors: J D; temporal?: R G N D",
        "out: R B G N D",  # the results; shapes are as in fastattn._shapes
        options=EncodeMemoryOptions,
        derivative=Derivative(...),  # the backward operator, see fastattn._derivative
        flops=lambda results, tokens, *rest, backward=False: ...,  # see fastattn._flops
    )
    memory = encode(tokens, weight, factors, None, EncodeMemoryOptions(padding_idx=0))

A call takes the shortest path that is correct:

* tensors with strided memory and without a gradient: directly to the backend that
  :mod:`fastattn.dispatch` chooses;
* with a gradient: through one ``torch.autograd.Function``;
* anything else (``torch.compile``, ``torch.export``, ``torch.func`` transforms, dispatch modes,
  fake tensors and other subclasses): through ``torch.ops.fastattn.<name>``, a dispatcher operator
  that calls the same backend. Tensors without strided memory take only this path.

The dispatcher accepts no records. So its last arguments are the fields of the record, followed by
``backend``, the name of the backend that ran. An empty name means "choose now". The forward passes
the name to the backward, so both run on the same backend. Everywhere else the arguments are the
tensors, the record, and the backend if it was chosen.

An operator without a derivative is differentiated through the reference backend, any number of
times. The operators ``<op>_backward`` have no derivative, so double backward works everywhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import _flops, compat, dispatch
from fastattn._derivative import Derivative, fold_batches
from fastattn._dtypes import Dtypes
from fastattn._gradient import Gradient
from fastattn._shapes import Declared, Shapes
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import NoOptions, values_of
from fastattn.backends.primitives import schema as schema_of
from fastattn.batching import rule_for_any_size, through_torch_vmap
from fastattn.compat import any_requires_grad, runs_eagerly, transforms_active, was_freed

_library = torch.library.Library("fastattn", "DEF")
operators: dict[Any, Operator] = {}  # key: the entry of `torch.ops.fastattn`
# A mode of the dispatcher does not see a call that an obstacle sends to the reference, because that
# happens above it. Each of these functions is called in place of `run`: (the entry of
# `torch.ops.fastattn`, its arguments, run).
watchers: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar("fastattn_watchers", default=())

_NOT_IN_ONNX = {
    "seed": "it drops weights, so call model.eval() before the export",
    "mask_program": "the pairs that a mask of fastattn.masks leaves visible depend on values",
}


class Operator:
    """One primitive, callable on any kind of tensor; see the module's docstring.

    A result with the name of an option is empty unless the option is set. ``sizes`` computes the
    sizes of results that are no sizes of tensors, from the options and the known sizes. The first
    result has the memory order of the tensor ``out_like``. ``fake`` makes the results of the
    compiler where this does not declare them. ``opaque`` names tensors
    that the kernels treat as constants: if one of them requires a gradient, the reference runs
    instead. ``recomputed`` names tensors that a derivative through the reference does not read.
    ``not_in_onnx`` maps names of tensors to the reason why a call with them cannot become a part of
    an ONNX graph; the key "" is a graph of ``torch.export``. ``derived`` computes an option that is
    None from the tensors, at run time: during tracing this would specialize the graph to one size.
    ``checked_by`` names the backends whose kernels check that their tensors have memory.
    ``formula`` is a derivative without a backward operator, (options, *grads) -> the gradient of
    the first tensor. ``vmap`` is a batching rule; None folds the mapped dimension into the batch
    (:func:`fastattn._derivative.fold_batches`) if the operator ``folds``.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        results: str,
        *,
        options: type = NoOptions,
        flops: Callable[..., int],
        sizes: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
        out_like: str = "",
        fake: Callable[..., Any] | None = None,
        derivative: Derivative | None = None,
        derivative_of: Derivative | None = None,
        formula: Callable[..., Any] | None = None,
        vmap: Callable[..., Any] | None = None,
        folds: bool = True,
        opaque: Sequence[str] = (),
        recomputed: Sequence[str] = (),
        not_in_onnx: Mapping[str, str] | None = None,
        derived: Mapping[str, Callable[..., Any]] | None = None,
        checked_by: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.declared, self.returned = Declared(tensors), Declared(results)
        self.names, self.results = [*self.declared.shapes], [*self.returned.shapes]
        self.returns = len(self.results)
        self._tensors = len(self.names)
        self.options = options
        self.opaque = [self.names.index(name) for name in opaque]
        self._recomputed = {self.names.index(name) for name in recomputed}
        reasons = {**_NOT_IN_ONNX, **(not_in_onnx or {})}
        self._not_in_onnx = {n: reasons[x] for n, x in enumerate(self.names) if x in reasons}
        self._no_graph_in_onnx = reasons.get("")
        self.derived = derived or {}
        self.checked_by = checked_by
        self._lse = self.names.index("lse") if "lse" in self.names else None
        self.flops, self.folds = flops, folds
        self._shapes = Shapes(name, self.declared)
        self._dtypes = Dtypes(name, self.names)
        self._sizes, self._out_like = sizes, out_like
        self._fake = fake or self._declared_results

        if derivative is not None:
            self.backward = derivative.operator_of(self)
        self.gradient = Gradient(self, derivative, formula)
        self.with_gradient = self.gradient.function(self.run, eager=True)
        self.planned, self.planned_first = map(self.gradient.function_of_plans, (False, True))
        self._traced = self.gradient.function(self._below_autograd, eager=False)
        arguments = (self.declared.schema(), schema_of(options), "str backend")
        returned = ", ".join(["Tensor"] * self.returns)
        returned = f"({returned})" if self.returns > 1 else returned
        schema = f"{name}({', '.join(filter(None, arguments))}) -> {returned}"
        self.op = self._register(schema, vmap or fold_batches(self, derivative_of))

    def __call__(self, *args: Any) -> Any:
        """Call with the tensors in the order of the schema, then the options or nothing."""
        if len(args) == self._tensors:
            args = (*args, self.options())
        if not runs_eagerly(*args[: self._tensors]):
            if compat.exports_onnx():
                return self._exported(*args)
            return self.dispatched(*args, "")
        if self.opaque and (obstacles := self.obstacles(args)):
            self.choose(args, obstacles)
            return self._through_reference(*args)
        tensors, options = self._primitive(args)
        backend = dispatch.choose(self.name, tensors, options)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return self.with_gradient(*tensors, options, backend)
        return self._run(backend, tensors, options)

    def dispatched(self, *args: Any) -> Any:
        """Call through PyTorch's dispatcher; the last argument is the backend or empty."""
        *tensors, options, backend = args
        if compat.MISSING and (obstacles := self._obstacles_of_public_autograd(args)):
            self.choose(args, obstacles)
            return self._through_reference(*args)
        return self.op(*tensors, *values_of(options), backend)

    def _exported(self, *args: Any) -> Any:
        """Run the reference: ONNX has functions for PyTorch's operators only."""
        for n, reason in self._not_in_onnx.items():
            if args[n] is not None:
                raise compat.not_in_onnx(self.name, reason)
        return self._through_reference(*args)

    def _recorded(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Convert the dispatcher's arguments: collect the options in a record."""
        n = self._tensors
        return *args[:n], self.options(*args[n:-1]), args[-1]

    def resume(self, ctx: Any, grads: Sequence[Any], saved: Sequence[Any]) -> Any:
        """Call a backward operator with the gradients, the forward's arguments, and its backend."""
        n, lifted = len(grads), self.lifted([*grads, *saved[:-2]])
        grads, saved = lifted[:n], (*lifted[n:], *saved[-2:])
        if self._lse is not None:  # a hook of saved tensors may make all of them float32
            place = self._lse - len(grads)
            saved = (*saved[:place], saved[place].to(torch.float64), *saved[place + 1 :])
        if not (ctx.eager and runs_eagerly(*grads)):
            return through_torch_vmap(lambda *grads: self.dispatched(*grads, *saved), grads)
        args = (*grads, *saved)
        tensors, options = self._primitive(args)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return self.with_gradient(*args)
        backend = args[-1]
        if backend not in self.checked_by:
            self._check_memory(tensors)
        return self._run(backend, tensors, options)

    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors of a plan, see :class:`fastattn.call.Plan`, in their declared dimensions."""
        return self._shapes.lifted(tensors)

    def _check_memory(self, tensors: Sequence[Tensor | None]) -> None:
        for name, tensor in zip(self.names, tensors, strict=True):
            if tensor is not None and was_freed(tensor):
                raise RuntimeError(
                    f"{self.name}: {name} has no memory: its storage was freed, or never allocated"
                )

    def obstacles(self, args: Sequence[Any]) -> list[str]:
        """The requirements of this call that only the reference supports."""
        if compat.forward_mode():
            return ["forward-mode differentiation goes through the reference"]
        return [
            f"{self.names[n]} requires a gradient, and no kernel computes it"
            for n in self.opaque
            if args[n] is not None and args[n].requires_grad and torch.is_grad_enabled()
        ]

    def choose(self, args: Sequence[Any], obstacles: Sequence[str] = ()) -> str:
        """Return the name of the backend that runs these arguments."""
        tensors, options = self._primitive(args)
        return dispatch.choose(self.name, tensors, options, obstacles)

    def primitive(self, backend: str) -> Callable[..., Any]:
        """Return the function of one backend."""
        return getattr(dispatch.load(backend), self.name)

    def run(self, *args: Any) -> Any:
        """Run the backend named by the last argument on plain tensors."""
        if args[-1] in self.checked_by:
            return getattr(dispatch.load(args[-1]), self.name)(*args[:-2], options=args[-2])
        tensors, options = self._primitive(args)
        return self._run(args[-1], tensors, options)

    def _run(self, backend: str, tensors: Sequence[Any], options: Any) -> Any:
        if backend != "reference":
            function = self.primitive(backend)
            return self._completed(
                function(*dispatch.accepted_tensors(function, tensors), options=options)
            )
        results = self._completed(dispatch.run_reference(self.name, tensors, options))
        # PyTorch's functions may return results in any memory order.
        return _in_layout_of(results, self._fake(*tensors, options))

    def _completed(self, results: Any) -> Any:
        """Append None for the gradients of trailing operands that a call does not have."""
        if self.returns == 1 or len(results) == self.returns:
            return results
        return (*results, *[None] * (self.returns - len(results)))

    def _declared_results(self, *args: Any) -> Any:
        """Empty results of the declared shapes and dtypes."""
        *tensors, options = args
        known, like = self._shapes.sizes(tensors), self._dtypes.leading(tensors)
        known |= {} if self._sizes is None else self._sizes(options, known)
        results = []
        for name in self.results:
            wanted = getattr(options, name, True)
            sizes = self.returned.sizes(name, known, int(wanted)) if wanted else (0,)
            if name == self.results[0] and self._out_like:
                results.append(empty_output(tensors[self.place_of(self._out_like)], sizes[-1]))
            else:
                results.append(like.new_empty(sizes, dtype=self._dtypes.of_result(name, like)))
        return results[0] if self.returns == 1 else tuple(results)

    def _shaped(self, *args: Any) -> Any:
        """The fake results for arguments of the dispatcher."""
        *tensors, options, _ = self._recorded(args)
        return self._fake(*tensors, options)

    def _run_for_dispatcher(self, *args: Any) -> Any:
        args = self._recorded(args)
        self._shapes.check(args)
        self._dtypes.check(args[: self._tensors])
        tensors, options = self._primitive(args)
        backend = args[-1] or dispatch.choose(self.name, tensors, options)
        if backend not in self.checked_by:
            self._check_memory(tensors)
        if backend == "reference":
            results = compat.run_outside(self._run, backend, tensors, options)
        else:
            results = self._run(backend, tensors, options)
        return results if self.returns == 1 else _without_none(results, tensors)

    def place_of(self, name: str) -> int:
        return self.names.index(name)

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Split the dispatcher's arguments into the tensors and the record of options."""
        *tensors, options, _ = self._recorded(args)
        return tensors, options

    def _primitive(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        n = self._tensors
        tensors, options = args[:n], args[n]
        for name, derive in self.derived.items():
            if getattr(options, name) is None:
                options = replace(options, **{name: derive(*tensors)})
        return tensors, options

    def _register(self, schema: str, vmap: Callable[..., Any]) -> Any:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = f"fastattn::{self.name}"
        _library.impl(self.name, self._run_for_dispatcher, "CompositeExplicitAutograd")
        if compat.MISSING:
            torch.library.register_autograd(
                name, self._backward_publicly, setup_context=self._set_up_publicly, lib=_library
            )
        else:
            _library.impl(self.name, self._autograd_kernel, "Autograd")
        torch.library.register_fake(name, self._shaped, lib=_library)

        def batched(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
            return vmap(info, in_dims[: self._tensors], *self._recorded(args))

        rule = rule_for_any_size(batched, self._shaped, self.returns)
        torch.library.register_vmap(name, rule, lib=_library)
        packet = getattr(torch.ops.fastattn, self.name)
        _flops.count(packet, self._work)
        operators[packet.default] = self
        return packet.default

    def _work(self, args: Sequence[Any], results: Any) -> int:
        """The floating-point operations of a call of the dispatcher."""
        tensors, options = self.split(args)
        return self.flops(results, *tensors, options)

    def _autograd_kernel(self, *args: Any) -> Any:
        """The dispatcher's Autograd kernel, called once for each level of ``torch.func.grad``."""
        arguments, args = args, self._recorded(args)
        if compat.exports_onnx():  # a graph of torch.export, which holds this operator
            if self._no_graph_in_onnx:
                raise compat.not_in_onnx(self.name, self._no_graph_in_onnx)
            return self._exported(*args)
        if obstacles := self.obstacles(args):
            self.choose(args, obstacles)
            run = functools.partial(self._through_reference, *args)
            for watch in watchers.get():
                run = functools.partial(watch, self.op, arguments, run)
            return run()
        if not (torch.is_grad_enabled() and any_requires_grad(*args[: self._tensors])):
            return self._below_autograd(*args)
        if not transforms_active():
            return self._traced(*args)
        with compat.single_level():  # this level; the one below follows in op()
            return self._traced(*args)

    def _below_autograd(self, *args: Any) -> Any:
        # A Function disables gradients in its forward, but the next level of torch.func needs them.
        grad = torch.enable_grad() if transforms_active() else contextlib.nullcontext()
        with compat.below_autograd(), grad:
            return self.dispatched(*args)

    # If PyTorch lacks the names that the Autograd kernel needs, torch.library.register_autograd
    # takes these functions.

    def _obstacles_of_public_autograd(self, args: Sequence[Any]) -> list[str]:
        differentiated = torch.is_grad_enabled() and any_requires_grad(*args[: self._tensors])
        # In a graph PyTorch raises where it cannot differentiate.
        if differentiated and not torch.compiler.is_compiling() and transforms_active():
            return ["torch.func differentiates through the reference"]
        return self.obstacles(args)

    def _set_up_publicly(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.gradient.keep(ctx, self._recorded(inputs), output, eager=False)

    def _backward_publicly(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n = self._tensors
        return *self.gradient.derive(ctx, *grads)[:n], *[None] * (len(ctx.needs_input_grad) - n)

    def _through_reference(self, *args: Any) -> Any:
        tensors, options = self._primitive(args)
        results = self._completed(dispatch.run_reference(self.name, tensors, options))
        return results if self.returns == 1 else _without_none(results, tensors)

    def backward_through_reference(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        args = [*ctx.saved_tensors, ctx.options, ctx.backend]
        inputs = [
            n
            for n, needed in enumerate(ctx.needs_input_grad)
            if needed and n not in self._recomputed
        ]
        outputs = [n for n, grad in enumerate(grads) if grad is not None]
        gradients: list[Tensor | None] = [None] * len(args)
        if not inputs or not outputs:
            return tuple(gradients)

        def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
            for n, leaf in zip(inputs, leaves, strict=True):
                args[n] = leaf
            results = self._through_reference(*args)
            return tuple(results[n] for n in outputs)

        vjp = torch.func.vjp(forward, *(args[n] for n in inputs))[1]
        for n, gradient in zip(inputs, vjp(tuple(grads[n] for n in outputs)), strict=True):
            gradients[n] = gradient
        return tuple(gradients)


def _without_none(results: Sequence[Tensor | None], tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Replace None by empty tensors, because a dispatcher operator returns tensors only."""
    like = next(t for t in tensors if t is not None)
    return tuple(like.new_empty(0) if result is None else result for result in results)


def _in_layout_of(results: Any, promised: Any) -> Any:
    """Return each result with the strides and the dtype that the fake implementation promises."""
    if isinstance(results, Tensor):
        return _conformed(results, promised)
    return tuple(_conformed(*pair) for pair in zip(results, promised, strict=True))


def _conformed(result: Tensor | None, promised: Tensor) -> Tensor:
    if result is None:
        return promised
    conforms = result.stride() == promised.stride() and result.dtype == promised.dtype
    # A view would alias an argument, or keep a larger buffer alive.
    return result if conforms and not compat.may_be_view(result) else promised.copy_(result)
