"""The adapter of Hopfield retrieval: from tensors to addresses and strides.

The steps use the kernels of memory hops, without the old state: u' = o. This module repeats rounds
of steps until every query has converged, and computes the three derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._hopfield import (
    ROUND,
    Found,
    Gradients,
    Patterns,
    Steps,
    operators,
    rounds,
)
from fastattn.backends._operands import address, operand
from fastattn.backends.cpu.memory_hops import hop_biases, hop_operands, vectors
from fastattn.backends.cpu.operands import DTYPES, accumulator
from fastattn.backends.cpu.sdpa import plain_attention, plain_attention_backward
from fastattn.backends.primitives import HopfieldOptions

# The first arguments of both native functions.
_Common = tuple[int, int, tuple[int, ...], HopfieldOptions, dict[str, Any], dict[str, Any] | None]


@dataclass(frozen=True)
class _Memory(Patterns):
    few_steps = -1  # always read `taken`, because there is no device to wait for

    def search(self, state: Tensor) -> Found:
        wide = accumulator(state.dtype)
        groups, queries, width = state.shape
        out = torch.empty((groups, queries, width), dtype=state.dtype, device="cpu")
        ends = torch.empty((groups, queries, 2, width), dtype=wide, device="cpu")
        stats = torch.empty((groups, queries, 2), dtype=wide, device="cpu")
        taken = torch.zeros((groups, queries), dtype=torch.int64, device="cpu")
        moved = None
        if self.options.together > 1:
            moved = torch.empty((groups, queries, 2), dtype=torch.float64, device="cpu")
        # Between two rounds Python can interrupt the search.
        for done, until in rounds(taken, self.options.steps_max, ROUND):
            _cpu.hopfield_forward(
                *self._arguments(state, until - done, ends, stats),
                _steps(taken, moved, search=True, resume=done > 0),
                {"out": out.data_ptr(), "weights": 0},
            )
        return out, taken, ends

    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """The trace is [G, Q, most + 1, D]."""
        return self._trace(state, taken, most, _steps(taken))[1]

    def search_once(self, state: Tensor) -> tuple[Tensor, Steps]:
        """The same as ``search`` in one round that keeps the steps; each query stops alone."""
        taken = torch.zeros(state.shape[:2], dtype=torch.int64, device="cpu")
        how = _steps(taken, search=True, keep=True)
        return self._trace(state, taken, self.options.steps_max, how)

    def _trace(
        self, state: Tensor, taken: Tensor, most: int, how: dict[str, Any]
    ) -> tuple[Tensor, Steps]:
        """The last state of each query, and its steps."""
        wide = accumulator(state.dtype)
        lead, width = state.shape[:-1], state.shape[-1]
        out = torch.empty(state.shape, dtype=state.dtype, device="cpu")
        trace = torch.empty((*lead, most + 1, width), dtype=wide, device="cpu")
        stats = torch.empty((*lead, most, 2), dtype=wide, device="cpu")
        _cpu.hopfield_forward(
            *self._arguments(state, most, trace, stats),
            how,
            {"out": out.data_ptr(), "weights": 0},
        )
        return out, Steps(state, taken, most, trace, stats)

    def derive(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, most, trace, stats = steps
        grad_state = torch.empty(state.shape, dtype=state.dtype, device="cpu")
        wanted = needed & (2 if self.keys is None else 6)
        grad_in, grad_stored = (
            torch.empty(x.shape, dtype=x.dtype, device="cpu") if x is not None and wanted else None
            for x in self.memories
        )
        scores = None
        if self.bias is not None and needed & 8:
            scores = torch.zeros(
                (*state.shape[:-1], most, self.stored.shape[1]), dtype=trace.dtype, device="cpu"
            )
        if state.shape[0] * state.shape[1] == 0:  # the kernel writes nothing then
            for result in (grad_state, grad_in, grad_stored, scores):
                if result is not None:
                    result.zero_()
        _cpu.hopfield_backward(
            *self._arguments(state, most, trace, stats),
            _steps(taken),
            {
                "grad_out": vectors(grad_out),
                "grad_weights": None,
                "grad_query": grad_state.data_ptr(),
                "grad_in": address(grad_in),
                "grad_out_memory": address(grad_stored),
                "grad_proj": 0,
                "grad_scores": address(scores),
                "grad_states": 0,
            },
        )
        return self.in_order(grad_state, (grad_in, grad_stored), scores, needed)

    def _arguments(self, state: Tensor, steps: int, trace: Tensor, stats: Tensor) -> _Common:
        groups, queries, width = state.shape
        m, c = self.memories
        memories = operand(m), None if c is None else operand(c)
        biases = None
        if self.mask is not None or self.bias is not None:
            mask, bias = (None if x is None else x.unsqueeze(2) for x in (self.mask, self.bias))
            biases = hop_biases(mask, bias)
        return (
            DTYPES[state.dtype],
            torch.get_num_threads(),
            (groups, queries, steps, self.stored.shape[1], width),
            self.options,
            hop_operands(state, *memories, None, trace, stats, groups == 1),
            biases,
        )


def _steps(
    taken: Tensor,
    moved: Tensor | None = None,
    *,
    search: bool = False,
    resume: bool = False,
    keep: bool = False,
) -> dict[str, Any]:
    """The native arguments of the steps. Without a search each query repeats its own number."""
    return {
        "taken": taken.data_ptr(),
        "moved": address(moved),
        "search": search,
        "resume": resume,
        "keep": keep,
    }


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)

_FEW_STEPS = 4  # whose states are kept for the backward pass of a plain call


def plain_retrieval(
    state: Tensor,  # [B, H, L, D]
    stored: Tensor,  # [B, H, N, D], with contiguous rows
    projection: Tensor | None,  # [B, H, N, Dv]
    mask: None,
    options: HopfieldOptions,
    unused: None,
    differentiable: bool,
) -> tuple[Tensor | None, ...]:
    """Return ``(out, lse, xi, taken, trace, stats)`` of a call that unrolls its steps, without
    other options. No tensor is empty.

    The states of a few steps are kept for the backward, so that it need not repeat them.
    """
    memory = _Memory(stored.flatten(0, 1), None, None, None, options)
    start = state.flatten(0, 1)
    trace: Tensor | None = None
    stats: Tensor | None = None
    if differentiable and 0 < options.steps_max <= _FEW_STEPS:
        xi, steps = memory.search_once(start)
        taken, trace, stats = steps.taken, steps.trace, steps.stats
    else:
        xi, taken = memory.search(start)[:2]
    xi = xi.view_as(state)  # view(shape) takes 2 us more
    value = stored if projection is None else projection
    out, lse = plain_attention(xi, stored, value, None, options.scale, False, differentiable)
    return out, lse, xi, taken, trace, stats


def plain_retrieval_backward(
    grad_out: Tensor,
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None,
    mask: None,
    out: Tensor,
    lse: Tensor,
    xi: Tensor,
    taken: Tensor,
    trace: Tensor | None,
    stats: Tensor | None,
    options: HopfieldOptions,
    unused: None,
    wants: Sequence[bool],  # the gradients of state, stored and projection
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of state, stored and projection of :func:`plain_retrieval`."""
    value = stored if projection is None else projection
    reading = (xi, stored, value, None, out, lse, options.scale, False)
    grad_xi, grad_stored, grad_value = plain_attention_backward(grad_out, *reading)
    if projection is None:
        grad_stored += grad_value
    if not (wants[0] or wants[1]):
        return None, grad_stored, grad_value
    memory = _Memory(stored.flatten(0, 1), None, None, None, options)
    start, taken = state.flatten(0, 1), taken.abs()
    if trace is None or stats is None:
        steps = memory.repeat(start, taken, int(taken.max()))
    else:
        steps = Steps(start, taken, options.steps_max, trace, stats)
    needed = 3 if wants[1] else 1
    grad_state, of_steps = memory.derive(grad_xi.flatten(0, 1), steps, needed)[:2]
    if of_steps is not None:
        grad_stored += of_steps.view_as(stored)
    return grad_state.view_as(state), grad_stored, grad_value
