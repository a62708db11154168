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
from fastattn.backends._hopfield import Found, Gradients, Patterns, operators
from fastattn.backends._memories import summed
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

    def repeat(self, state: Tensor, taken: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return all states [G, Q, 2 K + 1, D], and the statistics."""
        taken = taken.contiguous()
        lead, width = state.shape[:-1], state.shape[-1]
        out = state.new_empty(state.shape)
        trace = state.new_empty((*lead, 2 * steps + 1, width), dtype=torch.float32)
        stats = state.new_empty((*lead, steps, 2), dtype=torch.float32)
        room = self.room(state)
        with on(state) as stream:
            _cuda.memory_hops_forward(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, steps),
                self.options.scale,
                self.operands(state, trace=trace, stats=stats, scores=room, taken=taken),
                {"out": out.data_ptr(), "weights": 0},
            )
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
        groups, queries, width = state.shape
        taken = taken.contiguous()
        grad_state = state.new_empty(state.shape)
        wanted = needed & (2 if self.keys is None else 6)
        grad_in, grad_read = (
            x.new_empty(x.shape) if x is not None and wanted else None for x in self.memories
        )
        xs, ys = (
            state.new_empty((2, groups, queries, steps, length), dtype=torch.float32)
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
                self.sizes(state, steps),
                self.options.scale,
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
        grad_bias = None
        if self.bias is not None and needed & 8:
            grad_bias = summed(xs[0], self.bias.unsqueeze(2)).squeeze(2)
        if self.keys is None:
            return grad_state, grad_in, None, grad_bias
        return (
            grad_state,
            grad_read if needed & 2 else None,
            grad_in if needed & 4 else None,
            grad_bias,
        )


hopfield_retrieve, hopfield_retrieve_backward = operators(_Memory)
