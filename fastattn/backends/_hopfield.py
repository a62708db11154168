"""Hopfield retrieval and its three derivatives, for the backends with kernels of its steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattn.backends._alloc import summed_to
from fastattn.backends._memories import with_rows
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions

__all__ = ["ROUND", "Found", "Gradients", "Patterns", "Steps", "operators", "rounds"]

Found = tuple[Tensor, Tensor, Tensor]  # xi, taken, ends
Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
_Self = TypeVar("_Self", bound="Patterns")

ROUND = 256  # steps per call of a search without a limit, which may never converge


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

    # Whether the kernels need contiguous columns.
    needs_rows: ClassVar[bool] = True
    # Up to this limit there is room for all steps; beyond it the device is asked, and waited for.
    few_steps: ClassVar[int] = 8

    @classmethod
    def of(
        cls: type[_Self],
        stored: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        options: HopfieldOptions,
    ) -> _Self:
        if cls.needs_rows:
            stored, keys = with_rows(stored), with_rows(keys)
        return cls(stored, keys, mask, bias, options)

    @abc.abstractmethod
    def search(self, state: Tensor) -> Found:
        """Step until every query has converged or has taken ``steps_max`` steps."""

    @abc.abstractmethod
    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """Take ``taken`` steps of each query again; ``most`` is the largest number."""

    @abc.abstractmethod
    def derive(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        """The derivative of the steps that ``repeat`` took."""

    def unroll(
        self, grad_out: Tensor, state: Tensor, taken: Tensor, most: int, needed: int
    ) -> Gradients:
        """The derivative of ``taken`` steps of each query; ``most`` is the largest number."""
        return self.derive(grad_out, self.repeat(state, taken, most), needed)

    @property
    def memories(self) -> tuple[Tensor, Tensor | None]:
        """What is compared with, and what is summed if that is another."""
        return (self.stored, None) if self.keys is None else (self.keys, self.stored)

    def in_order(
        self,
        grad_state: Tensor,
        grad_memories: Sequence[Tensor | None],  # those of ``memories``
        grad_scores: Tensor | None,  # [G, Q, K, N]
        needed: int,
    ) -> Gradients:
        """Return the requested gradients of state, stored, keys and the bias."""
        grad_bias = None
        if grad_scores is not None and self.bias is not None:
            grad_bias = summed_to(self.bias.unsqueeze(2), grad_scores).squeeze(2)
        compared, read = grad_memories
        if self.keys is None:
            return grad_state, compared, None, grad_bias
        return (
            grad_state,
            read if needed & 2 else None,
            compared if needed & 4 else None,
            grad_bias,
        )

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
            return self.unroll(grad_out, state, steps, self._most(steps), needed)
        before, last = ends.unbind(2)
        once = torch.ones_like(taken)
        wide, grad_out = self._to(ends.dtype), grad_out.to(ends.dtype)
        if self.options.grad == "one_step":
            _, *derived = wide.unroll(grad_out, before, once, 1, needed)
            return self._in_dtypes((torch.zeros_like(before), *derived), state)

        # (1 - J) a = grad_out, J symmetric: then df/dstored^T a is the derivative of the solution.
        step = wide.repeat(last, once, 1)
        solved, a = _conjugate_gradients(
            lambda x: wide.derive(x, step, 0)[0],
            grad_out,
            taken > 0,
            2 * self.most_directions + 2,
        )
        found = wide.unroll(torch.where(solved, a, 0.0), last, once, 1, needed)
        grads: list[Tensor | None] = [torch.zeros_like(found[0]), *found[1:]]
        if not bool(solved.all()):  # not at a strict minimum
            rest = torch.where(solved, 0.0, grad_out)
            left = torch.where(solved.squeeze(-1), 0, taken.abs())
            start = state.to(ends.dtype)
            unrolled = wide.unroll(rest, start, left, self._most(left), needed)
            unrolled = (torch.where(solved, 0.0, unrolled[0]), *unrolled[1:])
            pairs = zip(grads, unrolled, strict=True)
            grads = [None if x is None or y is None else x + y for x, y in pairs]
        return self._in_dtypes(grads, state)

    @property
    def most_directions(self) -> int:
        """A bound of the rank of J."""
        return min(self.stored.shape[2], self.stored.shape[1])

    def _most(self, taken: Tensor) -> int:
        """The largest number of steps that a query took, and at least one."""
        if 0 <= self.options.steps_max <= self.few_steps:
            return max(self.options.steps_max, 1)
        return max(int(taken.max()), 1) if taken.numel() else 1

    def _to(self: _Self, dtype: torch.dtype) -> _Self:
        keys = None if self.keys is None else self.keys.to(dtype)
        return replace(self, stored=self.stored.to(dtype), keys=keys)

    def _in_dtypes(self, grads: Sequence[Tensor | None], state: Tensor) -> Gradients:
        """The gradients in the dtypes of what they are of."""
        pairs = zip(grads, (state, self.stored, self.keys, self.bias), strict=True)
        found = [None if g is None or x is None else g.to(x.dtype) for g, x in pairs]
        assert found[0] is not None
        return found[0], found[1], found[2], found[3]


def rounds(taken: Tensor, steps_max: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first step of each round of a search and the end of the round.

    A round has at most ``most`` steps. The last one ends with ``steps_max``, or with all queries at
    rest.
    """
    done = 0
    while True:
        until = done + most if steps_max < 0 else min(done + most, steps_max)
        yield done, until
        done = until
        if done == steps_max or bool((taken > 0).all()):
            return


def operators(memory: type[Patterns]) -> tuple[Callable[..., Found], Callable[..., Gradients]]:
    """Return ``hopfield_retrieve`` and ``hopfield_retrieve_backward`` on these kernels."""

    def hopfield_retrieve(
        state: Tensor,  # [G, Q, D]
        stored: Tensor,  # [G, N, D]
        keys: Tensor | None,  # [G, N, D]
        mask: Tensor | None,  # [G|1, Q|1, N|1]
        bias: Tensor | None,  # [G|1, Q|1, N|1]
        *,
        options: HopfieldOptions,
    ) -> Found:
        """Return ``(xi, taken, ends)``, see ``docs/design.md``."""
        return memory.of(stored, keys, mask, bias, options).search(state)

    def hopfield_retrieve_backward(
        grad_out: Tensor,  # [G, Q, D]
        state: Tensor,
        stored: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        taken: Tensor,  # [G, Q]
        ends: Tensor,  # [G, Q, 2, D]
        *,
        options: HopfieldBackwardOptions,
    ) -> Gradients:
        """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
        patterns = memory.of(stored, keys, mask, bias, options)
        return patterns.gradients(grad_out, state, taken, ends, options.needed)

    return hopfield_retrieve, hopfield_retrieve_backward


def _conjugate_gradients(
    slope: Callable[[Tensor], Tensor],  # J times a vector of each query, J symmetric
    b: Tensor,
    trusted: Tensor,
    steps: int,  # twice as many as would be exact without rounding
) -> tuple[Tensor, Tensor]:
    """Solve (1 - J) a = b for each query [G, Q, D]; return where that went well, and a.

    It does not where 1 - J is not positive definite along a direction that is met, nor where the
    residual is not down to rounding after all steps.
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
