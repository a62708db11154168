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
from fastattn.backends._operands import address, broadcast_operand
from fastattn.backends.cuda import memory_hops as hops
from fastattn.backends.cuda.operands import DTYPES, on
from fastattn.backends.primitives import MemoryHopOptions

__all__ = ["hopfield_retrieve", "hopfield_retrieve_backward", "why_not"]


def why_not(state: Tensor, stored: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return hops.why_not(state, stored, options=MemoryHopOptions())


@dataclass(frozen=True)
class _Memory(Patterns):
    def search(self, state: Tensor) -> Found:
        groups, queries, width = state.shape
        out = state.new_empty(state.shape)
        ends = state.new_empty((groups, queries, 2, width), dtype=torch.float32)
        taken = torch.empty((groups, queries), dtype=torch.int64, device=state.device)
        room = self.room(state)
        with on(state) as stream:
            _cuda.hopfield_search(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, self.options.steps_max),
                self.options,
                self.operands(state, trace=ends, scores=room, taken=taken),
                out.data_ptr(),
            )
        return out, taken, ends

    def _to(self, dtype: torch.dtype) -> _Memory:
        bias = None if self.bias is None else self.bias.to(dtype)  # kernels have no third dtype
        return replace(super()._to(dtype), bias=bias)

    def sizes(self, state: Tensor, steps: int) -> tuple[int, ...]:
        groups, queries, width = state.shape
        return groups, queries, steps, self.stored.shape[1], width

    def operands(self, state: Tensor, **states: Any) -> dict[str, Any]:
        mask, bias = (None if x is None else x.unsqueeze(2) for x in (self.mask, self.bias))
        return hops.hop_operands(state, *self.memories, None, mask, bias, **states)

    def room(self, state: Tensor) -> Tensor | None:
        """Global memory for scores that do not fit in shared memory, None if they fit."""
        rows = self.stored.shape[1]
        if rows <= _cuda.hop_rows_of_block:
            return None
        return state.new_empty((*state.shape[:-1], 2, rows), dtype=torch.float32)

    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        """The trace is [G, Q, 2 most + 1, D]."""
        taken = taken.contiguous()
        lead, width = state.shape[:-1], state.shape[-1]
        out = state.new_empty(state.shape)
        trace = state.new_empty((*lead, 2 * most + 1, width), dtype=torch.float32)
        stats = state.new_empty((*lead, most, 2), dtype=torch.float32)
        room = self.room(state)
        with on(state) as stream:
            _cuda.memory_hops_forward(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, most),
                MemoryHopOptions(scale=self.options.scale),
                self.operands(state, trace=trace, stats=stats, scores=room, taken=taken),
                {"out": out.data_ptr(), "weights": 0},
            )
        return Steps(state, taken, most, trace, stats)

    def derive(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, most, trace, stats = steps
        groups, queries, width = state.shape
        grad_state = state.new_empty(state.shape)
        wanted = needed & (2 if self.keys is None else 6)
        grad_in, grad_read = (
            x.new_empty(x.shape) if x is not None and wanted else None for x in self.memories
        )
        xs, ys = (
            state.new_empty((2, groups, queries, most, length), dtype=torch.float32)
            for length in (self.stored.shape[1], width)
        )
        room = self.room(state)
        if groups * queries == 0:  # the kernels write nothing then
            for result in (xs, ys, grad_state, grad_in, grad_read):
                if result is not None:
                    result.zero_()
        with on(state) as stream:
            _cuda.memory_hops_backward(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, most),
                MemoryHopOptions(scale=self.options.scale),
                self.operands(state, trace=trace, stats=stats, scores=room, taken=taken),
                {
                    "grad_out": broadcast_operand(grad_out.unsqueeze(2)),
                    "grad_weights": None,
                    "grad_query": grad_state.data_ptr(),
                    "grad_in": address(grad_in),
                    "grad_out_memory": address(grad_read),
                    "grad_proj": 0,
                    "xs": xs.data_ptr(),
                    "ys": ys.data_ptr(),
                    "in_of_batch": groups == 1,
                    "out_of_batch": groups == 1,
                },
            )
        scores = xs[0] if needed & 8 else None
        return self.in_order(grad_state, (grad_in, grad_read), scores, needed)


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)
