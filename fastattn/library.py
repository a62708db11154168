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
    sizes of results that no tensor has, from the options and the known sizes. The first result has
    the memory order of the tensor ``out_like``. ``fake`` makes empty results where these rules do
    not describe them. ``opaque`` names tensors that the kernels treat as constants: if one of them
    requires a gradient, the reference runs instead. ``recomputed`` names results of a forward
    that its backward operator reads, but the reference computes again: they get no gradient.
    ``not_in_onnx`` maps names of tensors to the reason why an ONNX graph cannot hold a call with
    them; its key "" is for a graph of ``torch.export``. ``derived`` computes an option that is None
    from the tensors, at run time: during tracing this would specialize the graph to one size.
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
        self._tensor_count = len(self.names)
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
            self.backward = derivative.backward_of(self)
        self.gradient = Gradient(self, derivative, formula)
        self.with_gradient = self.gradient.function(self.run, eager=True)
        self.planned, self.planned_first = map(self.gradient.function_of_plans, (False, True))
        self._differentiated = self.gradient.function(self._below_autograd, eager=False)
        arguments = (self.declared.schema(), schema_of(options), "str backend")
        types = ", ".join(["Tensor"] * self.returns)
        types = f"({types})" if self.returns > 1 else types
        schema = f"{name}({', '.join(filter(None, arguments))}) -> {types}"
        self.op = self._register(schema, vmap or fold_batches(self, derivative_of))

    def __call__(self, *args: Any) -> Any:
        """Call with the tensors in the order of the schema, then the options or nothing."""
        if len(args) == self._tensor_count:
            args = (*args, self.options())
        if not runs_eagerly(*args[: self._tensor_count]):
            if compat.exports_onnx():
                return self._run_for_onnx(*args)
            return self.dispatched(*args, "")
        if self.opaque and (obstacles := self.obstacles(args)):
            self.choose(args, obstacles)  # may warn or raise
            return self._through_reference(*args)
        tensors, options = self.backend_arguments(args)
        backend = dispatch.choose(self.name, tensors, options)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return self.with_gradient(*tensors, options, backend)
        return self._run(backend, tensors, options)

    def dispatched(self, *args: Any) -> Any:
        """Call through PyTorch's dispatcher; the last argument names the backend, or is empty."""
        *tensors, options, backend = args
        if compat.MISSING and (obstacles := self._public_obstacles(args)):
            self.choose(args, obstacles)
            return self._through_reference(*args)
        return self.op(*tensors, *values_of(options), backend)

    def _run_for_onnx(self, *args: Any) -> Any:
        """Run the reference: ONNX has functions for PyTorch's operators only."""
        for n, reason in self._not_in_onnx.items():
            if args[n] is not None:
                raise compat.not_in_onnx(self.name, reason)
        return self._through_reference(*args)

    def _with_record(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The dispatcher's arguments with the options collected in their record."""
        n = self._tensor_count
        return *args[:n], self.options(*args[n:-1]), args[-1]

    def resume(self, ctx: Any, grads: Sequence[Any], saved: Sequence[Any]) -> Any:
        """Call this backward operator; ``saved``: the saved tensors, the options, the backend."""
        *saved_tensors, options, backend = saved
        n, lifted = len(grads), self.lifted([*grads, *saved_tensors])
        grads, saved = lifted[:n], (*lifted[n:], options, backend)
        if self._lse is not None:  # a hook of saved tensors may make all of them float32
            place = self._lse - len(grads)
            saved = (*saved[:place], saved[place].to(torch.float64), *saved[place + 1 :])
        if not (ctx.eager and runs_eagerly(*grads)):
            return through_torch_vmap(lambda *grads: self.dispatched(*grads, *saved), grads)
        args = (*grads, *saved)
        tensors, options = self.backend_arguments(args)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return self.with_gradient(*args)
        if backend not in self.checked_by:
            self._check_memory(tensors)
        return self._run(backend, tensors, options)

    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors of a :class:`fastattn.call.Plan` with the declared numbers of dimensions."""
        return self._shapes.lifted(tensors)

    def _check_memory(self, tensors: Sequence[Tensor | None]) -> None:
        for name, tensor in zip(self.names, tensors, strict=True):
            if tensor is not None and was_freed(tensor):
                raise RuntimeError(
                    f"{self.name}: {name} has no memory: its storage was freed, or never allocated"
                )

    def obstacles(self, args: Sequence[Any]) -> list[str]:
        """The requirements of this call that only the reference meets, in words."""
        if compat.forward_mode():
            return ["forward-mode differentiation goes through the reference"]
        return [
            f"{self.names[n]} requires a gradient, and no kernel computes it"
            for n in self.opaque
            if args[n] is not None and args[n].requires_grad and torch.is_grad_enabled()
        ]

    def choose(self, args: Sequence[Any], obstacles: Sequence[str] = ()) -> str:
        """Return the name of the backend that runs a call; warn or raise as `dispatch.choose`."""
        tensors, options = self.backend_arguments(args)
        return dispatch.choose(self.name, tensors, options, obstacles)

    def primitive(self, backend: str) -> Callable[..., Any]:
        """Return the function by which one backend computes this operator."""
        return getattr(dispatch.load(backend), self.name)

    def run(self, *args: Any) -> Any:
        """Run the backend that the last argument names, on tensors with strided memory."""
        *operands, record, backend = args
        if backend in self.checked_by:
            return self.primitive(backend)(*operands, options=record)
        tensors, options = self.backend_arguments(args)
        return self._run(backend, tensors, options)

    def _run(self, backend: str, tensors: Sequence[Any], options: Any) -> Any:
        if backend != "reference":
            function = self.primitive(backend)
            return self._pad_with_none(
                function(*dispatch.accepted_tensors(function, tensors), options=options)
            )
        results = self._pad_with_none(dispatch.run_reference(self.name, tensors, options))
        # PyTorch's functions may return results in any memory order.
        return _in_layout_of(results, self._fake(*tensors, options))

    def _pad_with_none(self, results: Any) -> Any:
        """Append None for the gradients of trailing tensors that a call does not have."""
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
            form = getattr(options, name, True)  # False or 0: empty; n > 1: of the n-th shape
            sizes = self.returned.sizes(name, known, int(form)) if form else (0,)
            if name == self.results[0] and self._out_like:
                results.append(empty_output(tensors[self.place_of(self._out_like)], sizes[-1]))
            else:
                results.append(like.new_empty(sizes, dtype=self._dtypes.of_result(name, like)))
        return results[0] if self.returns == 1 else tuple(results)

    def _fake_for_dispatcher(self, *args: Any) -> Any:
        """Empty results for the dispatcher's arguments."""
        *tensors, options, _ = self._with_record(args)
        return self._fake(*tensors, options)

    def _run_for_dispatcher(self, *args: Any) -> Any:
        args = self._with_record(args)
        self._shapes.check(args)
        self._dtypes.check(args[: self._tensor_count])
        tensors, options = self.backend_arguments(args)
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
        *tensors, options, _ = self._with_record(args)
        return tensors, options

    def backend_arguments(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """The tensors and the options that a backend gets: options that are None are derived."""
        n = self._tensor_count
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
                name, self._public_backward, setup_context=self._public_setup_context, lib=_library
            )
        else:
            _library.impl(self.name, self._autograd_kernel, "Autograd")
        torch.library.register_fake(name, self._fake_for_dispatcher, lib=_library)

        def vmap_of_record(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
            return vmap(info, in_dims[: self._tensor_count], *self._with_record(args))

        rule = rule_for_any_size(vmap_of_record, self._fake_for_dispatcher, self.returns)
        torch.library.register_vmap(name, rule, lib=_library)
        packet = getattr(torch.ops.fastattn, self.name)
        _flops.count(packet, self._flops_of_call)
        operators[packet.default] = self
        return packet.default

    def _flops_of_call(self, args: Sequence[Any], results: Any) -> int:
        """The floating-point operations of a call of the dispatcher."""
        tensors, options = self.split(args)
        return self.flops(results, *tensors, options)

    def _autograd_kernel(self, *args: Any) -> Any:
        """The dispatcher's Autograd kernel, called once for each level of ``torch.func.grad``."""
        dispatcher_args, args = args, self._with_record(args)
        if compat.exports_onnx():  # a graph of torch.export, which holds this operator
            if self._no_graph_in_onnx:
                raise compat.not_in_onnx(self.name, self._no_graph_in_onnx)
            return self._run_for_onnx(*args)
        if obstacles := self.obstacles(args):
            self.choose(args, obstacles)
            run = functools.partial(self._through_reference, *args)
            for watch in watchers.get():
                run = functools.partial(watch, self.op, dispatcher_args, run)
            return run()
        if not (torch.is_grad_enabled() and any_requires_grad(*args[: self._tensor_count])):
            return self._below_autograd(*args)
        if not transforms_active():
            return self._differentiated(*args)
        with compat.single_level():  # this level of grad; `dispatched` calls the level below
            return self._differentiated(*args)

    def _below_autograd(self, *args: Any) -> Any:
        # A Function disables gradients in its forward, but the next level of torch.func needs them.
        grad = torch.enable_grad() if transforms_active() else contextlib.nullcontext()
        with compat.below_autograd(), grad:
            return self.dispatched(*args)

    # If PyTorch lacks the names that the Autograd kernel needs, torch.library.register_autograd
    # takes these functions.

    def _public_obstacles(self, args: Sequence[Any]) -> list[str]:
        """:meth:`obstacles`, and gradients of ``torch.func``, which public autograd lacks."""
        differentiated = torch.is_grad_enabled() and any_requires_grad(*args[: self._tensor_count])
        # In a graph PyTorch raises where it cannot differentiate.
        if differentiated and not torch.compiler.is_compiling() and transforms_active():
            return ["torch.func differentiates through the reference"]
        return self.obstacles(args)

    def _public_setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.gradient.save(ctx, self._with_record(inputs), output, eager=False)

    def _public_backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n = self._tensor_count
        return *self.gradient.derive(ctx, *grads)[:n], *[None] * (len(ctx.needs_input_grad) - n)

    def _through_reference(self, *args: Any) -> Any:
        tensors, options = self.backend_arguments(args)
        results = self._pad_with_none(dispatch.run_reference(self.name, tensors, options))
        return results if self.returns == 1 else _without_none(results, tensors)

    def backward_through_reference(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the arguments, by differentiating the reference's forward."""
        args = [*ctx.saved_tensors, ctx.options, ctx.backend]
        input_places = [
            n
            for n, needed in enumerate(ctx.needs_input_grad)
            if needed and n not in self._recomputed
        ]
        output_places = [n for n, grad in enumerate(grads) if grad is not None]
        gradients: list[Tensor | None] = [None] * len(args)
        if not input_places or not output_places:
            return tuple(gradients)

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            for n, x in zip(input_places, inputs, strict=True):
                args[n] = x
            results = self._through_reference(*args)
            return tuple(results[n] for n in output_places)

        vjp = torch.func.vjp(forward, *(args[n] for n in input_places))[1]
        input_grads = vjp(tuple(grads[n] for n in output_places))
        for n, gradient in zip(input_places, input_grads, strict=True):
            gradients[n] = gradient
        return tuple(gradients)


def _without_none(results: Sequence[Tensor | None], tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Replace None by empty tensors, because a dispatcher operator returns tensors only."""
    like = next(t for t in tensors if t is not None)
    return tuple(like.new_empty(0) if result is None else result for result in results)


def _in_layout_of(results: Any, fakes: Any) -> Any:
    """Return each result with the strides and the dtype of its fake result."""
    if isinstance(results, Tensor):
        return _conform(results, fakes)
    return tuple(_conform(*pair) for pair in zip(results, fakes, strict=True))


def _conform(result: Tensor | None, fake: Tensor) -> Tensor:
    """Return the result, or a copy of it in the memory of ``fake``, which has not been written."""
    if result is None:
        return fake
    conforms = result.stride() == fake.stride() and result.dtype == fake.dtype
    # A view would alias an argument, or keep a larger buffer alive.
    return result if conforms and not compat.may_be_view(result) else fake.copy_(result)
