"""The adapter of Hopfield retrieval.

The steps use the kernels of memory hops, without the old state: u' = o.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastattn import _cpu
from fastattn.backends._hopfield import Found, Gradients, Patterns, Steps, operators
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions

# state, stored, keys, mask, bias
_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
_FEW_STEPS = 4  # whose states are kept, so that the backward pass need not take them again


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


_search_backward = operators(_Memory)[1]


def hopfield_retrieve(
    state: Tensor,  # [G, Q, D], or [B, H, Q, D] with the groups of the others
    stored: Tensor,  # [G, N, D]
    keys: Tensor | None,  # [G, N, D]
    mask: Tensor | None,  # [G|1, Q|1, N|1]
    bias: Tensor | None,  # [G|1, Q|1, N|1]
    *,
    options: HopfieldOptions,
    keeps: bool = False,
) -> Any:
    """Return ``(xi, taken, ends)``, see ``docs/design.md``.

    With ``keeps``, also ``trace`` and ``stats`` of the backward pass, which then does not read the
    ends; None if there may be many steps.
    """
    few = 0 < options.steps_max <= _FEW_STEPS and options.together == 1
    keep = keeps and few and options.grad == "unroll"
    tensors = (state, stored, keys, mask, bias)
    xi, taken, states, stats = _cpu.hopfield_retrieve(options, *tensors, keep)
    if not keeps:
        return xi, taken, states
    return xi, taken, states, states if keep else None, stats


def hopfield_retrieve_backward(
    grad_out: Tensor,  # as state
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    taken: Tensor,  # [G, Q] or [B, H, Q]
    ends: Tensor,  # [G, Q, 2, D], or the trace
    *,
    options: HopfieldBackwardOptions,
    trace: Tensor | None = None,  # [G, Q, K + 1, D]
    stats: Tensor | None = None,  # [G, Q, K, 2]
) -> Gradients:
    """Return the gradients of state, stored, keys and the bias, see ``docs/design.md``."""
    if trace is not None and stats is not None:
        steps = Steps(state, taken, options.steps_max, trace, stats)
        return _Memory(stored, keys, mask, bias, options).derive(grad_out, steps, options.needed)
    patterns = (state, stored, keys)
    groups = [x if x is None else x.flatten(0, -3) for x in (grad_out, *patterns)]
    own: Any = (mask, bias, taken.flatten(0, -2), ends)
    *grads, grad_bias = _search_backward(*groups, *own, options=options)
    views: Any = (
        x if x is None or y is None else x.view_as(y) for x, y in zip(grads, patterns, strict=True)
    )
    return *views, grad_bias
