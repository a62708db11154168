"""Hopfield retrieval and its three derivatives, for the backends with kernels of its steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions

Retrieved = tuple[Tensor, Tensor, Tensor]  # xi, taken, ends
Gradients = tuple[Any, ...]  # of state, stored, keys and the bias, a Tensor or None
_Self = TypeVar("_Self", bound="Patterns")


class Steps(NamedTuple):
    """The steps of every query from its state."""

    state: Tensor  # [G, Q, D]
    taken: Tensor  # [G, Q]
    most: int  # no query takes more
    trace: Tensor  # all states; each backend has its own layout
    stats: Tensor  # [G, Q, most, 2]


@dataclass(frozen=True)
class Patterns(abc.ABC):
    """The stored patterns, and how a step reads them."""

    stored: Tensor  # [G, N, D]
    keys: Tensor | None  # [G, N, D]
    mask: Tensor | None  # [G|1, Q|1, N|1]
    bias: Tensor | None  # [G|1, Q|1, N|1]
    options: HopfieldOptions

    # Up to this limit, memory for all steps is allocated; beyond it, the host waits for the device
    # to tell how many steps were taken.
    few_steps: ClassVar[int] = 8

    @abc.abstractmethod
    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """Repeat ``taken`` steps of each query; ``most`` is the largest number."""

    @abc.abstractmethod
    def gradients_of(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        """Return the derivative of the steps that ``repeat`` took."""

    def backward_through_steps(
        self, grad_out: Tensor, state: Tensor, taken: Tensor, most: int, needed: int
    ) -> Gradients:
        """Return the derivative of ``taken`` steps of each query, at most ``most``."""
        return self.gradients_of(grad_out, self.repeat(state, taken, most), needed)

    def gradients(
        self,
        grad_out: Tensor,  # [G, Q, D]
        state: Tensor,
        taken: Tensor,  # [G, Q]
        ends: Tensor,  # [G, Q, 2, D]
        needed: int,
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        if self.options.grad == "unroll":
            steps = taken.abs()
            return self.backward_through_steps(
                grad_out, state, steps, self._most_steps(steps), needed
            )
        before, last = ends.unbind(2)
        once = torch.ones_like(taken)
        wide, grad_out = self._to(ends.dtype), grad_out.to(ends.dtype)
        if self.options.grad == "one_step":
            _, *derived = wide.backward_through_steps(grad_out, before, once, 1, needed)
            return self._in_dtypes((torch.zeros_like(before), *derived), state)

        # (1 - J) a = grad_out, J symmetric: then df/dstored^T a is the derivative of the solution.
        step = wide.repeat(last, once, 1)
        solved, a = _conjugate_gradients(
            lambda x: wide.gradients_of(x, step, 0)[0],
            grad_out,
            taken > 0,
            2 * self.most_directions + 2,
        )
        _, *of_solved = wide.backward_through_steps(
            torch.where(solved, a, 0.0), last, once, 1, needed
        )
        grads: list[Tensor | None] = [torch.zeros_like(before), *of_solved]
        if not bool(solved.all()):  # not at a strict minimum
            unsolved = torch.where(solved, 0.0, grad_out)
            steps = torch.where(solved.squeeze(-1), 0, taken.abs())
            start, most = state.to(ends.dtype), self._most_steps(steps)
            unrolled = wide.backward_through_steps(unsolved, start, steps, most, needed)
            unrolled = (torch.where(solved, 0.0, unrolled[0]), *unrolled[1:])
            pairs = zip(grads, unrolled, strict=True)
            grads = [None if x is None or y is None else x + y for x, y in pairs]
        return self._in_dtypes(grads, state)

    @property
    def most_directions(self) -> int:
        """An upper bound of the rank of J."""
        return min(self.stored.shape[2], self.stored.shape[1])

    def _most_steps(self, taken: Tensor) -> int:
        """The largest number of steps that a query took, and at least one."""
        if 0 <= self.options.steps_max <= self.few_steps:
            return max(self.options.steps_max, 1)
        return max(int(taken.max()), 1) if taken.numel() else 1

    def _to(self: _Self, dtype: torch.dtype) -> _Self:
        keys, bias = (x if x is None else x.to(dtype) for x in (self.keys, self.bias))
        return replace(self, stored=self.stored.to(dtype), keys=keys, bias=bias)

    def _in_dtypes(self, grads: Sequence[Tensor | None], state: Tensor) -> Gradients:
        """Convert the gradients to the dtypes of their tensors."""
        pairs = zip(grads, (state, self.stored, self.keys, self.bias), strict=True)
        return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in pairs)


def backward_on(memory: type[Patterns]) -> Callable[..., Gradients]:
    """Return ``hopfield_retrieve_backward`` on these kernels."""

    def hopfield_retrieve_backward(
        grad_out: Tensor,  # as state
        state: Tensor,  # [G, Q, D], or in a plan [B, H, Q, D], where G = B * H
        stored: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        taken: Tensor,  # [G, Q] or [B, H, Q]
        ends: Tensor,  # [G, Q, 2, D]
        *,
        options: HopfieldBackwardOptions,
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        tensors = (state, stored, keys)
        flat: list[Any] = [x if x is None else x.flatten(0, -3) for x in (grad_out, *tensors)]
        grad, start, held, compared = flat
        patterns = memory(held, compared, mask, bias, options)
        rows = taken.flatten(0, -2)
        *grads, of_bias = patterns.gradients(grad, start, rows, ends, options.needed)
        pairs = zip(grads, tensors, strict=True)
        shaped = (x if x is None or y is None else x.view(y.shape) for x, y in pairs)
        return *shaped, of_bias

    return hopfield_retrieve_backward


def backward_of_steps(
    take_steps: Callable[..., Any],
    derive_steps: Callable[..., Any],
    few_steps: int = Patterns.few_steps,
) -> Callable[..., Gradients]:
    """Return ``hopfield_retrieve_backward`` on these native functions.

    The steps use the kernels of memory hops, without the old state: u' = o.
    """

    @dataclass(frozen=True)
    class Memory(Patterns):
        def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
            states = take_steps(*self._tensors(state), taken, options=self.options, most=most)
            return Steps(state, taken, most, *states)

        def gradients_of(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
            state, taken, _, *states = steps
            tensors = (grad_out, *self._tensors(state), taken, *states)
            grads: Gradients = derive_steps(*tensors, options=self.options, needed=needed)
            return grads

        def _tensors(self, state: Tensor) -> tuple[Tensor | None, ...]:
            return state, self.stored, self.keys, self.mask, self.bias

    Memory.few_steps = few_steps
    derive_again = backward_on(Memory)

    def hopfield_retrieve_backward(
        *tensors: Tensor | None,  # as derive_again, then trace and stats that the forward kept
        options: HopfieldBackwardOptions,
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        *tensors_of_steps, _, trace, stats = (*tensors, None, None)[:10]
        if trace is None:
            return derive_again(*tensors[:8], options=options)
        kept = (*tensors_of_steps, trace, stats)
        grads: Gradients = derive_steps(*kept, options=options, needed=options.needed)
        return grads

    return hopfield_retrieve_backward


def _conjugate_gradients(
    slope: Callable[[Tensor], Tensor],  # J times a vector of each query, J symmetric
    b: Tensor,
    trusted: Tensor,
    steps: int,  # twice as many as would be exact without rounding
) -> tuple[Tensor, Tensor]:
    """Solve (1 - J) a = b for each query [G, Q, D]; return which queries succeeded, and a.

    A query fails if 1 - J is not positive definite along a search direction, or if the residual
    exceeds rounding after all steps.
    """
    tolerance = 16 * torch.finfo(b.dtype).eps
    a, residual, direction = torch.zeros_like(b), b, b
    size = (b * b).sum(-1, keepdim=True)
    enough = tolerance * tolerance * size
    solved, sound = size == 0, trusted[..., None]
    for _ in range(steps):
        moving = sound & ~solved
        if not bool(moving.any()):
            break
        image = direction - slope(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        sound = sound & (solved | (curvature > 0))
        moving = moving & sound
        length = torch.where(moving, size / curvature, 0.0)
        a = torch.where(moving, a + length * direction, a)
        residual = torch.where(moving, residual - length * image, residual)
        smaller = torch.where(moving, (residual * residual).sum(-1, keepdim=True), size)
        direction = torch.where(moving, residual + smaller / size * direction, direction)
        size, solved = smaller, solved | (smaller <= enough)
    return sound & solved, a
