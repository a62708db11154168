"""The three derivatives of Hopfield retrieval, for the backends with kernels for its steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions

Retrieval = tuple[Tensor, Tensor, Tensor]  # the results (xi, taken, ends) of the primitive
Gradients = tuple[Any, ...]  # of state, stored, keys and the bias: each a Tensor or None
_Self = TypeVar("_Self", bound="Patterns")


class Steps(NamedTuple):
    """The steps of every query from a state, with the tensors that their derivative needs."""

    state: Tensor  # [G, Q, D], before the first step
    taken: Tensor  # [G, Q], the number of steps of each query
    max_steps: int  # no query takes more
    trace: Tensor  # the states after each step; each backend has its own layout
    stats: Tensor  # [G, Q, max_steps, 2], the softmax of each step


@dataclass(frozen=True)
class Patterns(abc.ABC):
    """The stored patterns, and the derivatives of retrieval. Backends define how steps run."""

    stored: Tensor  # [G, N, D]
    keys: Tensor | None  # [G, N, D]
    mask: Tensor | None  # [G|1, Q|1, N|1]
    bias: Tensor | None  # [G|1, Q|1, N|1]
    options: HopfieldOptions

    # Up to this limit, memory for all steps is allocated; beyond it, the host waits for the device
    # to tell how many steps were taken.
    few_steps: ClassVar[int] = 8

    @abc.abstractmethod
    def repeat(self, state: Tensor, taken: Tensor, max_steps: int) -> Steps:
        """Run ``taken`` steps of each query from ``state`` again, at most ``max_steps``."""

    @abc.abstractmethod
    def gradients_of_steps(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        """Return the gradients through ``steps``, which ``repeat`` returned.

        Bit n of ``needed`` requests gradient n; the gradient of the state is always computed.
        """

    def backward_through_steps(
        self, grad_out: Tensor, state: Tensor, taken: Tensor, max_steps: int, needed: int
    ) -> Gradients:
        """Return the gradients through ``taken`` steps of each query, at most ``max_steps``."""
        return self.gradients_of_steps(grad_out, self.repeat(state, taken, max_steps), needed)

    def gradients(
        self,
        grad_out: Tensor,  # [G, Q, D]
        state: Tensor,
        taken: Tensor,  # [G, Q], negative if the query has not converged
        ends: Tensor,  # [G, Q, 2, D], the last two states
        needed: int,  # bits of the gradients to compute
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        if self.options.grad == "unroll":
            steps = taken.abs()
            return self.backward_through_steps(
                grad_out, state, steps, self._most_steps(steps), needed
            )
        before, last = ends.unbind(2)
        one_step = torch.ones_like(taken)
        wide, grad_out = self._in_dtype(ends.dtype), grad_out.to(ends.dtype)
        if self.options.grad == "one_step":
            _, *grads_of_step = wide.backward_through_steps(grad_out, before, one_step, 1, needed)
            return self._cast_gradients((torch.zeros_like(before), *grads_of_step), state)

        # Solve (1 - J) a = grad_out, where J = df/dxi is symmetric. The gradient of stored is then
        # df/dstored^T a, which is its gradient through one step with grad_out = a.
        step = wide.repeat(last, one_step, 1)
        solved, a = _conjugate_gradients(
            lambda x: wide.gradients_of_steps(x, step, needed=0)[0],  # J x
            grad_out,
            taken > 0,
            2 * self.most_directions + 2,
        )
        _, *grads_of_solved = wide.backward_through_steps(
            torch.where(solved, a, 0.0), last, one_step, 1, needed
        )
        grads: list[Tensor | None] = [torch.zeros_like(before), *grads_of_solved]
        if not bool(solved.all()):  # some queries are not at a strict minimum: unroll their steps
            unsolved = torch.where(solved, 0.0, grad_out)
            steps = torch.where(solved.squeeze(-1), 0, taken.abs())
            start, max_steps = state.to(ends.dtype), self._most_steps(steps)
            unrolled = wide.backward_through_steps(unsolved, start, steps, max_steps, needed)
            unrolled = (torch.where(solved, 0.0, unrolled[0]), *unrolled[1:])
            pairs = zip(grads, unrolled, strict=True)
            grads = [None if x is None or y is None else x + y for x, y in pairs]
        return self._cast_gradients(grads, state)

    @property
    def most_directions(self) -> int:
        """An upper bound of the rank of J; without rounding, a solution takes one step more."""
        return min(self.stored.shape[2], self.stored.shape[1])

    def _most_steps(self, taken: Tensor) -> int:
        """The largest number of steps of a query, or a bound of it; at least one."""
        if 0 <= self.options.steps_max <= self.few_steps:
            return max(self.options.steps_max, 1)
        return max(int(taken.max()), 1) if taken.numel() else 1

    def _in_dtype(self: _Self, dtype: torch.dtype) -> _Self:
        keys, bias = (x if x is None else x.to(dtype) for x in (self.keys, self.bias))
        return replace(self, stored=self.stored.to(dtype), keys=keys, bias=bias)

    def _cast_gradients(self, grads: Sequence[Tensor | None], state: Tensor) -> Gradients:
        """Convert the gradients to the dtypes of their tensors."""
        pairs = zip(grads, (state, self.stored, self.keys, self.bias), strict=True)
        return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in pairs)


def make_backward(patterns_type: type[Patterns]) -> Callable[..., Gradients]:
    """Return ``hopfield_retrieve_backward``, whose steps run as in this class."""

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
        flat_grad, flat_state, flat_stored, flat_keys = flat
        patterns = patterns_type(flat_stored, flat_keys, mask, bias, options)
        *grads, grad_bias = patterns.gradients(
            flat_grad, flat_state, taken.flatten(0, -2), ends, options.needed
        )
        pairs = zip(grads, tensors, strict=True)
        shaped = (g if g is None or x is None else g.view(x.shape) for g, x in pairs)
        return *shaped, grad_bias

    return hopfield_retrieve_backward


def make_backward_of_steps(
    take_steps: Callable[..., Any],
    derive_steps: Callable[..., Any],
    few_steps: int = Patterns.few_steps,
) -> Callable[..., Gradients]:
    """Return ``hopfield_retrieve_backward``, from native functions for steps and their derivative.

    The steps run on the kernels of memory hops, as hops without the old state: u' = o.
    """

    @dataclass(frozen=True)
    class Memory(Patterns):
        def repeat(self, state: Tensor, taken: Tensor, max_steps: int) -> Steps:
            states = take_steps(*self._tensors(state), taken, options=self.options, most=max_steps)
            return Steps(state, taken, max_steps, *states)

        def gradients_of_steps(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
            state, taken, _, *states = steps
            tensors = (grad_out, *self._tensors(state), taken, *states)
            grads: Gradients = derive_steps(*tensors, options=self.options, needed=needed)
            return grads

        def _tensors(self, state: Tensor) -> tuple[Tensor | None, ...]:
            return state, self.stored, self.keys, self.mask, self.bias

    Memory.few_steps = few_steps
    backward_after_repeat = make_backward(Memory)

    def hopfield_retrieve_backward(
        *tensors: Tensor | None,  # the eight of `make_backward`; trace and stats of the forward
        options: HopfieldBackwardOptions,
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        required, (trace, stats) = tensors[:8], (*tensors[8:], None, None)[:2]
        if trace is None:
            return backward_after_repeat(*required, options=options)
        *step_tensors, _ends = required
        grads: Gradients = derive_steps(
            *step_tensors, trace, stats, options=options, needed=options.needed
        )
        return grads

    return hopfield_retrieve_backward


def _conjugate_gradients(
    times_j: Callable[[Tensor], Tensor],  # J times a vector of each query, J symmetric
    b: Tensor,  # [G, Q, D]
    converged: Tensor,  # [G, Q], the other queries fail
    steps: int,  # twice as many as would be exact without rounding
) -> tuple[Tensor, Tensor]:
    """Solve (1 - J) a = b for each query; return which queries succeeded [G, Q, 1], and a.

    A query fails if 1 - J is not positive definite along a search direction, or if the residual
    exceeds rounding after all steps.
    """
    tolerance = 16 * torch.finfo(b.dtype).eps
    a, residual, direction = torch.zeros_like(b), b, b
    residual_squared = (b * b).sum(-1, keepdim=True)
    tolerated = tolerance * tolerance * residual_squared
    solved, definite = residual_squared == 0, converged[..., None]
    for _ in range(steps):
        moving = definite & ~solved
        if not bool(moving.any()):
            break
        image = direction - times_j(direction)  # (1 - J) direction
        curvature = (direction * image).sum(-1, keepdim=True)
        definite = definite & (solved | (curvature > 0))
        moving = moving & definite
        step_length = torch.where(moving, residual_squared / curvature, 0.0)
        a = torch.where(moving, a + step_length * direction, a)
        residual = torch.where(moving, residual - step_length * image, residual)
        next_squared = torch.where(
            moving, (residual * residual).sum(-1, keepdim=True), residual_squared
        )
        direction = torch.where(
            moving, residual + next_squared / residual_squared * direction, direction
        )
        residual_squared, solved = next_squared, solved | (next_squared <= tolerated)
    return definite & solved, a
