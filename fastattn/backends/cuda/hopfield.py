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
from fastattn.backends._hopfield_gradients import Gradients, Patterns
from fastattn.backends.cuda import memory_hops as hops
from fastattn.backends.cuda.operands import DTYPES, address, broadcast_operand, on
from fastattn.backends.primitives import (
    HopfieldBackwardOptions,
    HopfieldOptions,
    MemoryHopOptions,
)

__all__ = ["hopfield_retrieve", "hopfield_retrieve_backward", "why_not"]


def why_not(state: Tensor, stored: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return hops.why_not(state, stored, options=MemoryHopOptions())


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
    memory = _Memory.of(stored, keys, mask, bias, options)
    groups, queries, width = state.shape
    out = state.new_empty(state.shape)
    ends = state.new_empty((groups, queries, 2, width), dtype=torch.float32)
    taken = torch.empty((groups, queries), dtype=torch.int64, device=state.device)
    shared = (ends, None, None, memory.room(state), taken)
    with on(state) as stream:
        _cuda.hopfield_search(
            DTYPES[state.dtype],
            stream,
            memory.sizes(state, options.steps_max),
            memory.flags,
            options,
            memory.bias_dtype,
            memory.operands(state),
            tuple(map(address, shared)),
            out.data_ptr(),
        )
    return out, taken, ends


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
    @classmethod
    def of(
        cls,
        stored: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        options: HopfieldOptions,
    ) -> _Memory:
        stored = hops.with_columns_together(stored)
        keys = None if keys is None else hops.with_columns_together(keys)
        return cls(stored, keys, mask, bias, options)

    def _to(self, dtype: torch.dtype) -> _Memory:
        bias = None if self.bias is None else self.bias.to(dtype)  # kernels have no third dtype
        return replace(super()._to(dtype), bias=bias)

    @property
    def flags(self) -> tuple[bool, bool]:
        """Whether both memories are the same rows, and whether they are a stack."""
        return self.keys is None, False

    @property
    def bias_dtype(self) -> int:
        return 0 if self.bias is None else DTYPES[self.bias.dtype]

    def sizes(self, state: Tensor, steps: int) -> tuple[int, ...]:
        groups, queries, width = state.shape
        return groups, queries, steps, self.stored.shape[1], width

    def operands(self, state: Tensor) -> tuple[tuple[int, tuple[int, ...]] | None, ...]:
        mask, bias = (None if x is None else x.unsqueeze(2) for x in (self.mask, self.bias))
        return (
            broadcast_operand(state.unsqueeze(2)),
            hops.rows_of(self.memories[0].unsqueeze(1)),
            hops.rows_of(self.stored.unsqueeze(1)),
            None,
            None if mask is None else broadcast_operand(mask),
            None if bias is None else broadcast_operand(bias),
        )

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
        shared = (trace, stats, None, self.room(state), taken)
        with on(state) as stream:
            _cuda.memory_hops_forward(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, steps),
                self.flags,
                self.options.scale,
                self.bias_dtype,
                self.operands(state),
                tuple(map(address, shared)),
                (out.data_ptr(), 0),
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
        results = (xs, ys, grad_state, grad_in, grad_read, None)
        shared = (trace, stats, None, self.room(state), taken)
        if groups * queries == 0:  # the kernels write nothing then
            for result in results:
                if result is not None:
                    result.zero_()
        with on(state) as stream:
            _cuda.memory_hops_backward(
                DTYPES[state.dtype],
                stream,
                self.sizes(state, steps),
                self.flags,
                self.options.scale,
                self.bias_dtype,
                self.operands(state),
                tuple(map(address, shared)),
                (broadcast_operand(grad_out.unsqueeze(2)), None),
                tuple(map(address, results)),
                (1, 1, 1),
                (groups == 1, groups == 1),
            )
        grad_bias = None
        if self.bias is not None and needed & 8:
            grad_bias = hops.summed(xs[0], self.bias.unsqueeze(2)).squeeze(2)
        if self.keys is None:
            return grad_state, grad_in, None, grad_bias
        return (
            grad_state,
            grad_read if needed & 2 else None,
            grad_in if needed & 4 else None,
            grad_bias,
        )
