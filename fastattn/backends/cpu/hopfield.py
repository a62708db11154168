"""The adapter of Hopfield retrieval: from tensors to addresses and strides.

The steps use the kernels of memory hops, without the old state: u' = o. This module repeats rounds
of steps until every query has converged, and computes the three derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._hopfield_gradients import Gradients, Patterns
from fastattn.backends.cpu.memory_hops import _memory, _Operand, _summed, _with_rows
from fastattn.backends.cpu.operands import DTYPES, broadcast_operand
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions

_SHARED, _SAME_ROWS, _SEARCH, _RESUME = 1, 2, 8, 16
_ROUND = 256  # steps per call, so that a search without a limit can be interrupted


def hopfield_retrieve(
    state: Tensor,  # [G, Q, D]
    stored: Tensor,  # [G, N, D]
    keys: Tensor | None,  # [G, N, D]
    mask: Tensor | None,  # [G|1, Q|1, N|1]
    bias: Tensor | None,  # [G|1, Q|1, N|1]
    *,
    options: HopfieldOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(xi, taken, ends)``, see ``docs/design.md``."""
    return _Memory.of(stored, keys, mask, bias, options).search(state)


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
    memory = _Memory.of(stored, keys, mask, bias, options)
    return memory.gradients(grad_out, state, taken, ends, options.needed)


@dataclass(frozen=True)
class _Memory(Patterns):
    few_steps = -1  # always read `taken`, because there is no device to wait for

    @classmethod
    def of(
        cls,
        stored: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        options: HopfieldOptions,
    ) -> _Memory:
        return cls(_with_rows(stored), _with_rows(keys), mask, bias, options)

    def search(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step until every query has converged or has taken ``steps_max`` steps."""
        wide = torch.float64 if state.dtype is torch.float64 else torch.float32
        lead, width = state.shape[:-1], state.shape[-1]
        out = torch.empty(state.shape, dtype=state.dtype)
        ends = torch.empty((*lead, 2, width), dtype=wide)
        stats = torch.empty((*lead, 2), dtype=wide)
        taken = torch.zeros(lead, dtype=torch.int64)
        moved = torch.empty((*lead, 2), dtype=torch.float64)
        steps_max = self.options.steps_max
        flags, done = _SEARCH, 0
        while True:
            steps = _ROUND if steps_max < 0 else min(_ROUND, steps_max - done)
            results = (out.data_ptr(), ends.data_ptr(), stats.data_ptr(), 0)
            self._run(False, state, steps, flags, (), results, taken, moved)
            done += steps
            if done == steps_max or bool((taken > 0).all()):
                return out, taken, ends
            flags = _SEARCH | _RESUME

    def repeat(self, state: Tensor, taken: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return all states [G, Q, K + 1, D], and the statistics."""
        wide = torch.float64 if state.dtype is torch.float64 else torch.float32
        lead, width = state.shape[:-1], state.shape[-1]
        out = torch.empty(state.shape, dtype=state.dtype)
        trace = torch.empty((*lead, steps + 1, width), dtype=wide)
        stats = torch.empty((*lead, steps, 2), dtype=wide)
        results = (out.data_ptr(), trace.data_ptr(), stats.data_ptr(), 0)
        self._run(False, state, steps, 0, (), results, taken)
        return trace, stats

    def derive(
        self,
        grad_out: Tensor,
        state: Tensor,
        taken: Tensor,
        trace: Tensor,
        stats: Tensor,
        steps: int,
        needed: int,
    ) -> Gradients:
        stored, keys, bias = self.stored, self.keys, self.bias
        grad_state = torch.empty(state.shape, dtype=state.dtype)
        wanted = needed & (2 if keys is None else 6)
        grad_in, grad_stored = (
            torch.empty(x.shape, dtype=x.dtype) if x is not None and wanted else None
            for x in self.memories
        )
        scores = None
        if bias is not None and needed & 8:
            scores = torch.zeros((*state.shape[:-1], steps, stored.shape[1]), dtype=trace.dtype)
        results = (grad_state, grad_in, grad_stored, None, scores, None)
        if state.shape[0] * state.shape[1] == 0:  # the kernel writes nothing then
            for result in results:
                if result is not None:
                    result.zero_()
        addresses = [0 if x is None else x.data_ptr() for x in results]
        batch, query, column = grad_out.stride()
        self._run(
            True,
            state,
            steps,
            0,
            ((grad_out.data_ptr(), (batch, query, 0, column)), None),
            (0, trace.data_ptr(), stats.data_ptr(), 0, *addresses),
            taken,
        )
        grad_bias = None
        if scores is not None and bias is not None:
            grad_bias = _summed(scores, bias.unsqueeze(2)).squeeze(2)
        if keys is None:
            return grad_state, grad_in, None, grad_bias
        grad_stored = grad_stored if needed & 2 else None
        return grad_state, grad_stored, grad_in if needed & 4 else None, grad_bias

    def _run(
        self,
        backward: bool,
        state: Tensor,
        steps: int,
        flags: int,
        given: tuple[_Operand | None, ...],
        results: tuple[int, ...],
        taken: Tensor,
        moved: Tensor | None = None,
    ) -> None:
        groups, queries, width = state.shape
        stored = self.stored
        flags |= _SHARED if groups == 1 else 0
        if self.keys is None:
            flags |= _SAME_ROWS
        batch, query, column = state.stride()
        mask = None if self.mask is None else broadcast_operand(self.mask.unsqueeze(2))
        bias = None if self.bias is None else broadcast_operand(self.bias.unsqueeze(2))
        _cpu.hopfield_steps(
            backward,
            DTYPES[state.dtype],
            torch.get_num_threads(),
            (groups, queries, steps, stored.shape[1], width),
            flags,
            self.options,
            0 if self.bias is None else DTYPES[self.bias.dtype],
            (
                (state.data_ptr(), (batch, query, 0, column)),
                _memory(stored if self.keys is None else self.keys),
                _memory(stored),
                None,
                mask,
                bias,
                *given,
            ),
            results,
            taken.data_ptr(),
            0 if moved is None else moved.data_ptr(),
        )
