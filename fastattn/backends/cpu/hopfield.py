"""The adapter of Hopfield retrieval.

The steps use the kernels of memory hops, without the old state: u' = o.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastattn import _cpu
from fastattn.backends._hopfield import Found, Gradients, Patterns, Steps, operators

# state, stored, keys, mask, bias
_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Memory(Patterns):
    few_steps = -1  # always read `taken`, because there is no device to wait for

    def search(self, state: Tensor) -> Found:
        xi, taken, ends, _ = _cpu.hopfield_retrieve(self.options, *self._tensors(state), False)
        return xi, taken, ends

    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """The trace is [G, Q, most + 1, D]."""
        steps = _cpu.hopfield_steps(self.options, *self._tensors(state), taken, most)
        return Steps(state, taken, most, *steps)

    def derive(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, _, trace, stats = steps
        grad_state, *grad_memories, grad_scores = _cpu.hopfield_backward(
            self.options, grad_out, *self._tensors(state), taken, trace, stats, needed
        )
        return self.in_order(grad_state, grad_memories, grad_scores, needed)

    def _tensors(self, state: Tensor) -> _Tensors:
        return state, self.stored, self.keys, self.mask, self.bias


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)
