"""Hopfield retrieval on the CUDA kernels.

The search stops on the device, separately for each query. Its derivatives use the kernels of memory
hops, without the old state: u' = o.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._hopfield import Found, Gradients, Patterns, Steps, operators
from fastattn.backends.cuda import memory_hops as hops
from fastattn.backends.cuda.operands import launch
from fastattn.backends.primitives import MemoryHopOptions

__all__ = ["hopfield_retrieve", "hopfield_retrieve_backward", "why_not"]


def why_not(state: Tensor, stored: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return hops.why_not(state, stored, options=MemoryHopOptions())


@dataclass(frozen=True)
class _Memory(Patterns):
    def search(self, state: Tensor) -> Found:
        found: Any = launch(_cuda.hopfield_retrieve, state, self.options, *self._tensors(state))
        return found

    def _to(self, dtype: torch.dtype) -> _Memory:
        bias = None if self.bias is None else self.bias.to(dtype)  # kernels have no third dtype
        return replace(super()._to(dtype), bias=bias)

    def _tensors(self, state: Tensor) -> tuple[Tensor | None, ...]:
        return state, self.stored, self.keys, self.mask, self.bias

    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """The trace is [G, Q, 2 most + 1, D]."""
        tensors = self._tensors(state)
        states = launch(_cuda.hopfield_steps, state, self.options, *tensors, taken, most)
        return Steps(state, taken, most, *states)

    def derive(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, most, trace, stats = steps
        needs_memories = needed & (2 if self.keys is None else 6) != 0
        tensors, states = self._tensors(state), (taken, trace, stats, most)
        grad_state, *grad_memories, of_scores = launch(
            _cuda.hopfield_backward,
            state,
            self.options,
            grad_out,
            *tensors,
            *states,
            needs_memories,
        )
        scores = of_scores[0] if needed & 8 else None
        return self.in_order(grad_state, grad_memories, scores, needed)


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)
