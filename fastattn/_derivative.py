"""Derives the backward operator and the rules for ``vmap`` from the declaration of a primitive.

The backward operator of ``<op>`` is ``<op>_backward``, so a backward pass reaches the backends in
the same way as a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import extend_options, needs_gradient
from fastattn.batching import fold, one_by_one, size_of_batch, unfold

if TYPE_CHECKING:
    from fastattn.library import Operator


@dataclass(frozen=True)
class Derivative:
    """The backward operator of a primitive, by the names of the primitive's tensors and results."""

    grads: str  # the results that have a gradient
    reads: str  # tensors and results that the backward kernel takes after the gradients
    gives: str  # the tensors whose gradients it returns
    options: type  # its record
    in_order: str = ""  # of `gives`: [..., L, D], whose gradient has the memory order of the tensor
    opaque: str = ""  # tensors that the backward kernel treats as constants
    operator: type[Operator] | None = None  # the class of the backward operator
    fake: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # Extra results of the CPU's forward kernel, tensors or None: the last inputs of its backward.
    keeps: str = ""
    # The options of the backward pass that follow from the tensors of the call.
    of_call: Callable[..., Any] | None = None

    def flags(self) -> list[str]:
        """The tensors that have a ``needs_..._grad`` flag in the backward options."""
        names = {field.name for field in fields(self.options)}
        if "needed" in names:
            return self.gives.split()
        return ["attn_mask"] if "needs_mask_grad" in names else []

    def options_for(self, options: Any, needed: tuple[bool, ...]) -> Any:
        """The backward options of a call; ``needed``: the gradients of :meth:`flags`."""
        if self.flags() == ["attn_mask"]:
            return extend_options(self.options, options, needs_mask_grad=needed[0])
        bits = sum(1 << n for n, need in enumerate(needed) if need)
        return extend_options(self.options, options, needed=bits)

    def wants(self, options: Any, n: int) -> bool:
        """Whether gradient n is computed at all; the other ones are empty."""
        return needs_gradient(options, n, self.gives.split()[n])

    def operator_of(self, operator: Operator) -> Operator:
        """The backward operator."""
        grads, reads = self.grads.split(), self.reads.split()
        declared, returned = operator.declared, operator.returned
        optional = "?" * (len(grads) > 1)
        tensors = [f"grad_{name}{optional}:{returned.shapes[name]}" for name in grads]
        of_call = declared.shapes
        tensors += [(declared if name in of_call else returned).item(name) for name in reads]
        tensors += [f"{whole} % {divisor}" for whole, divisor in declared.multiples]
        return (self.operator or type(operator))(
            f"{operator.name}_backward",
            ";".join(tensors),
            ";".join(f"grad_{name}" for name in self.gives.split()),
            options=self.options,
            fake=self.fake or self._fake,
            flops=self._flops_of(operator),
            vmap=self.vmap,
            folds=operator.folds,
            opaque=self.opaque.split(),
            recomputed=[name for name in reads if name in operator.results],
            derived=self._derived_of(operator),
            checked_by=operator.checked_by,
            derivative_of=self,
        )

    def named(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The tensors of the backward operator after the gradients, by name."""
        return dict(zip(self.reads.split(), tensors[len(self.grads.split()) :], strict=False))

    def _fake(self, *args: Any) -> tuple[Tensor, ...]:
        *tensors, options = args
        named = self.named(tensors)
        first = next(x for x in tensors if x is not None)  # as an operator that runs
        results = []
        for n, name in enumerate(self.gives.split()):
            x = named[name]
            if x is None or not self.wants(options, n):
                results.append(first.new_empty(0))
            elif name in self.in_order.split():
                results.append(empty_output(x, x.shape[-1]))
            else:
                results.append(x.new_empty(x.shape))
        return tuple(results)

    def _flops_of(self, operator: Operator) -> Callable[..., int]:
        def flops(_: Any, *args: Any) -> int:
            *tensors, options = args
            named = self.named(tensors)
            results = [named.get(name) for name in operator.results]
            if results[0] is None:  # its gradient has the same shape
                results[0] = tensors[0]
            of_call = [named.get(name) for name in operator.names]
            return operator.flops(results, *of_call, options, backward=True)

        return flops

    def _derived_of(self, operator: Operator) -> dict[str, Callable[..., Any]]:
        def of_forward(derive: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *tensors: derive(*self.named(tensors).values())

        return {name: of_forward(derive) for name, derive in operator.derived.items()}


def is_placeholder(name: str, options: Any) -> bool:
    """Whether a result is empty: one with the name of an option that is not set."""
    return not getattr(options, name, True)


def fold_batches(
    operator: Operator, derivative: Derivative | None = None
) -> Callable[..., tuple[Any, Any]]:
    """The batching rule that folds the mapped dimension into the batch.

    The batch is the first size of the first tensor's shape. Examples run one by one if a tensor
    without a batch is mapped, or has a gradient (one for each example); if there is dropout, whose
    draws depend on the place in the batch; and if the operator has no batch. ``derivative`` is
    given for a backward operator.
    """
    batched = _batched(operator)
    gives = derivative.gives.split() if derivative else []
    places = [operator.names.index(name) if name in operator.names else None for name in gives]

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        n = info.batch_size
        *tensors, options, backend = args
        alone = [
            place
            for place, (x, dim) in enumerate(zip(tensors, in_dims, strict=True))
            if x is not None and not batched[place] and (dim is not None or place in places)
        ]
        if alone or not any(batched) or getattr(options, "dropout_p", 0) > 0:
            return one_by_one(operator, n, in_dims, args)
        whole = [place for place, kind in enumerate(batched) if kind == "whole"]
        first = next(place for place in whole if tensors[place] is not None)
        batch = size_of_batch(tensors[first], in_dims[first])
        folded = [
            fold(x, dim, n, batch) if kind else x
            for x, dim, kind in zip(tensors, in_dims, batched, strict=True)
        ]
        shared = set()
        for place in (place for place in places if place is not None):
            x = folded[place]
            if x is not None and size_of_batch(tensors[place], in_dims[place]) == 1:
                # The examples share it, but not its gradient.
                folded[place] = x.expand(n * batch, *x.shape[1:])
                shared.add(place)
        results = operator.dispatched(*folded, options, backend)
        if operator.returns == 1:
            return unfold(results, n), 0
        unfolded = []
        for k, (name, x) in enumerate(zip(operator.results, results, strict=True)):
            if derivative is None:
                empty = is_placeholder(name, options)
            else:
                read = places[k]
                is_absent = read is not None and tensors[read] is None
                empty = is_absent or not derivative.wants(options, k)
            if empty:
                unfolded.append(x.expand(n, 0))
            elif derivative and places[k] in shared:
                unfolded.append(unfold(x, n).sum(1, keepdim=True))
            else:
                unfolded.append(unfold(x, n))
        return tuple(unfolded), (0,) * len(unfolded)

    return rule


def _batched(operator: Operator) -> list[str]:
    """For each tensor: "whole" if its first size is the batch, "one" if it may be 1, else ""."""
    if not operator.folds:
        return [""] * len(operator.names)
    shapes = operator.declared.shapes.values()
    firsts = [next(iter(shape.split()), "") for shape in shapes]
    batch = next(first for first in firsts if first)
    return [
        "whole" if first == batch else "one" if first == f"{batch}|1" else "" for first in firsts
    ]
