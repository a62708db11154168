"""The adapter of Hopfield retrieval: from tensors to addresses and strides.

The steps use the kernels of memory hops, without the old state: u' = o. This module repeats rounds
of steps until every query has converged, and computes the three derivatives.
"""

from __future__ import annotations

import functools
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
from fastattn.backends.primitives import AttentionOptions, HopfieldOptions

# The first arguments of both native functions.
_Common = tuple[int, int, tuple[int, ...], HopfieldOptions, dict[str, Any], dict[str, Any] | None]


# A mask, slopes, a seed, sinks, a relative bias with its positions, and a mask program.
_NO_BIASES = (None,) * 7


@functools.lru_cache(maxsize=64)
def _reading(scale: float) -> _cpu.AttentionOptions:
    """The attention that reads the stored patterns at the end."""
    return _cpu.AttentionOptions(AttentionOptions(scale=scale))


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
        wide = accumulator(state.dtype)
        lead, width = state.shape[:-1], state.shape[-1]
        out = torch.empty(state.shape, dtype=state.dtype, device="cpu")
        trace = torch.empty((*lead, most + 1, width), dtype=wide, device="cpu")
        stats = torch.empty((*lead, most, 2), dtype=wide, device="cpu")
        _cpu.hopfield_forward(
            *self._arguments(state, most, trace, stats),
            _steps(taken),
            {"out": out.data_ptr(), "weights": 0},
        )
        return Steps(state, taken, most, trace, stats)

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
) -> dict[str, Any]:
    """The native arguments of the steps. Without a search each query repeats its own number."""
    return {
        "taken": taken.data_ptr(),
        "moved": address(moved),
        "search": search,
        "resume": resume,
    }


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)

_FEW_STEPS = 4  # whose states are kept, so that the backward pass need not take them again


def plain_retrieval_call(state: Any, stored: Any, projection: Any) -> int:
    """Return a number that is the same for calls of one dtype, or 0: take the general path.

    It is odd if a tensor requires a gradient. If it is not 0, all are plain tensors of the CPU of
    one dtype, not empty: state [B, H, L, D], stored [B, H, N, D] with contiguous rows, projection
    [B, H, N, Dv] or None.
    """
    return _cpu.plain_retrieval_call(state, stored, projection)


def plain_retrieval(
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None,
    mask: None,
    options: HopfieldOptions,
    unused: None,
    differentiable: bool,
) -> tuple[Tensor | None, ...]:
    """Return ``(out, lse, xi, kept, taken)`` of a call that unrolls its steps, without other
    options: of a few steps, all that the backward pass reads is kept, else how many were taken.
    """
    start, rows = state.flatten(0, 1), stored.flatten(0, 1)
    taken: Tensor | None = None
    kept: Tensor | None = None
    if 0 < options.steps_max <= _FEW_STEPS:
        limits = options.scale, options.eps, options.steps_max
        xi, kept = _cpu.plain_steps(start, rows, *limits, torch.get_num_threads())
    else:
        xi, taken = _Memory(rows, None, None, None, options).search(start)[:2]
    xi = xi.view_as(state)  # view(shape) takes 2 us more
    value = stored if projection is None else projection
    reading = _reading(options.scale)
    out, lse, _ = _cpu.attention(reading, xi, stored, value, *_NO_BIASES, differentiable)
    return out, lse, xi, kept, taken


def plain_retrieval_backward(
    grad_out: Tensor,
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None,
    mask: None,
    out: Tensor,
    lse: Tensor,
    xi: Tensor,
    kept: Tensor | None,
    taken: Tensor | None,
    options: HopfieldOptions,
    unused: None,
    wants: Sequence[bool],  # the gradients of state, stored and projection
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of state, stored and projection of :func:`plain_retrieval`, or None: the
    general path has to compute them.
    """
    value = stored if projection is None else projection
    reading = _reading(options.scale)
    tensors = (xi, stored, value, None, None, None, out, lse, None, None, None, None)
    grads: Any = _cpu.attention_backward(reading, grad_out, None, None, *tensors)
    grad_xi, grad_stored, grad_value, *_ = grads
    if projection is None:
        grad_stored += grad_value
    if not (wants[0] or wants[1]):
        return None, grad_stored, grad_value
    grad_xi, start, rows = grad_xi.flatten(0, 1), state.flatten(0, 1), stored.flatten(0, 1)
    if kept is not None:
        how = options.scale, options.steps_max, wants[1], torch.get_num_threads()
        grads = _cpu.plain_steps_backward(grad_xi, start, rows, kept, *how)
        if grads is None:
            return None
        grad_state, of_steps = grads
    else:
        assert taken is not None
        memory, taken = _Memory(rows, None, None, None, options), taken.abs()
        steps = memory.repeat(start, taken, int(taken.max()))
        grad_state, of_steps = memory.derive(grad_xi, steps, 3 if wants[1] else 1)[:2]
    if of_steps is not None:
        grad_stored += of_steps.view_as(stored)
    return grad_state.view_as(state), grad_stored, grad_value
