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
    """Declares the backward operator of a primitive; a ``str`` lists names of its tensors."""

    grads: str  # the results that have a gradient
    reads: str  # tensors and results that the backward kernel takes after the gradients
    gives: str  # the tensors whose gradients it returns
    options: type  # the record of the backward operator's options
    in_order: str = ""  # of `gives`: tensors [..., L, D] whose gradients keep their memory order
    opaque: str = ""  # tensors that the backward kernel treats as constants
    operator: type[Operator] | None = None  # the class of the backward operator
    fake: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    # Extra results of the CPU's forward kernel, tensors or None, which its backward reads last.
    keeps: str = ""
    # (tensors and options of the forward) -> the options of the backward pass.
    of_call: Callable[..., Any] | None = None

    def skippable(self) -> list[str]:
        """The tensors whose gradients the option ``needed`` or ``needs_mask_grad`` can skip."""
        names = {field.name for field in fields(self.options)}
        if "needed" in names:
            return self.gives.split()
        return ["attn_mask"] if "needs_mask_grad" in names else []

    def backward_options(self, options: Any, needed: tuple[bool, ...]) -> Any:
        """The options of a backward pass; ``needed``: which gradients of :meth:`skippable`."""
        if self.skippable() == ["attn_mask"]:
            return extend_options(self.options, options, needs_mask_grad=needed[0])
        bits = sum(1 << n for n, need in enumerate(needed) if need)
        return extend_options(self.options, options, needed=bits)

    def computes(self, options: Any, n: int) -> bool:
        """Whether gradient n is computed; otherwise it is an empty tensor."""
        return needs_gradient(options, n, self.gives.split()[n])

    def backward_of(self, operator: Operator) -> Operator:
        """Make the backward operator of ``operator``: it takes gradients, then what it reads."""
        grads, reads = self.grads.split(), self.reads.split()
        declared, returned = operator.declared, operator.returned
        optional = "?" * (len(grads) > 1)  # a result that is not used has no gradient
        tensors = [f"grad_{name}{optional}:{returned.shapes[name]}" for name in grads]
        owners = (declared if name in declared.shapes else returned for name in reads)
        tensors += [owner.item(name) for owner, name in zip(owners, reads, strict=True)]
        tensors += [f"{whole} % {divisor}" for whole, divisor in declared.multiples]
        return (self.operator or type(operator))(
            f"{operator.name}_backward",
            ";".join(tensors),
            ";".join(f"grad_{name}" for name in self.gives.split()),
            options=self.options,
            fake=self.fake or self._fake,
            flops=self._backward_flops(operator),
            vmap=self.vmap,
            folds=operator.folds,
            opaque=self.opaque.split(),
            recomputed=[name for name in reads if name in operator.results],
            derived=self._derived_options(operator),
            checked_by=operator.checked_by,
            derivative_of=self,
        )

    def read_tensors(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The tensors that the backward operator takes after the gradients, by name."""
        return dict(zip(self.reads.split(), tensors[len(self.grads.split()) :], strict=False))

    def _fake(self, *args: Any) -> tuple[Tensor, ...]:
        """Empty gradients of the right shapes."""
        *tensors, options = args
        read = self.read_tensors(tensors)
        like = next(x for x in tensors if x is not None)  # the same as in a call that runs
        results = []
        for n, name in enumerate(self.gives.split()):
            x = read[name]
            if x is None or not self.computes(options, n):
                results.append(like.new_empty(0))
            elif name in self.in_order.split():
                results.append(empty_output(x, x.shape[-1]))
            else:
                results.append(x.new_empty(x.shape))
        return tuple(results)

    def _backward_flops(self, operator: Operator) -> Callable[..., int]:
        def flops(_: Any, *args: Any) -> int:
            *tensors, options = args
            read = self.read_tensors(tensors)
            results = [read.get(name) for name in operator.results]
            if results[0] is None:  # its gradient has the same shape
                results[0] = tensors[0]
            forward_tensors = [read.get(name) for name in operator.names]
            return operator.flops(results, *forward_tensors, options, backward=True)

        return flops

    def _derived_options(self, operator: Operator) -> dict[str, Callable[..., Any]]:
        def from_read_tensors(derive: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *tensors: derive(*self.read_tensors(tensors).values())

        return {name: from_read_tensors(derive) for name, derive in operator.derived.items()}


def is_placeholder(name: str, options: Any) -> bool:
    """Whether the result ``name`` is empty, because the option of the same name is not set."""
    return not getattr(options, name, True)


def fold_batches(
    operator: Operator, derivative: Derivative | None = None
) -> Callable[..., tuple[Any, Any]]:
    """The batching rule that folds the mapped dimension into the batch.

    The batch is the first size of the first tensor's shape. Examples run one by one if a tensor
    without a batch is mapped, or has a gradient (one for each example); if there is dropout, whose
    draws depend on the place in the batch; and if the operator has no batch. A backward operator
    passes its ``derivative``.
    """
    kinds = _batch_kinds(operator)
    gives = derivative.gives.split() if derivative else []
    # For each gradient the index of its tensor; None if the backward does not read the tensor.
    tensor_of_grad = [
        operator.names.index(name) if name in operator.names else None for name in gives
    ]

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        n = info.batch_size
        *tensors, options, backend = args
        cannot_fold = any(
            x is not None and not kind and (dim is not None or n_tensor in tensor_of_grad)
            for n_tensor, (x, dim, kind) in enumerate(zip(tensors, in_dims, kinds, strict=True))
        )
        if cannot_fold or not any(kinds) or getattr(options, "dropout_p", 0) > 0:
            return one_by_one(operator, n, in_dims, args)
        batched = next(
            i for i, kind in enumerate(kinds) if kind == "whole" and tensors[i] is not None
        )
        batch = size_of_batch(tensors[batched], in_dims[batched])
        folded = [
            fold(x, dim, n, batch) if kind else x
            for x, dim, kind in zip(tensors, in_dims, kinds, strict=True)
        ]
        shared = set()
        for i in (i for i in tensor_of_grad if i is not None):
            x = folded[i]
            if x is not None and size_of_batch(tensors[i], in_dims[i]) == 1:
                # The batch shares the tensor, but each example has its own gradient.
                folded[i] = x.expand(n * batch, *x.shape[1:])
                shared.add(i)
        results = operator.dispatched(*folded, options, backend)
        if operator.returns == 1:
            return unfold(results, n), 0
        unfolded = []
        for k, (name, x) in enumerate(zip(operator.results, results, strict=True)):
            if derivative is None:
                is_empty = is_placeholder(name, options)
            else:
                own = tensor_of_grad[k]
                is_absent = own is not None and tensors[own] is None
                is_empty = is_absent or not derivative.computes(options, k)
            if is_empty:
                unfolded.append(x.expand(n, 0))
            elif derivative and tensor_of_grad[k] in shared:
                unfolded.append(unfold(x, n).sum(1, keepdim=True))
            else:
                unfolded.append(unfold(x, n))
        return tuple(unfolded), (0,) * len(unfolded)

    return rule


def _batch_kinds(operator: Operator) -> list[str]:
    """For each tensor: "whole" if its first size is the batch, "one" if it may also be 1, or ""."""
    if not operator.folds:
        return [""] * len(operator.names)
    shapes = operator.declared.shapes.values()
    first_sizes = [next(iter(shape.split()), "") for shape in shapes]
    batch = next(size for size in first_sizes if size)
    kind_of_size = {batch: "whole", f"{batch}|1": "one"}
    return [kind_of_size.get(size, "") for size in first_sizes]
