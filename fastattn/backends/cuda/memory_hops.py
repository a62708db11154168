"""The memory hops on the CUDA kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda.operands import (
    DTYPES,
    MAX_LENGTH,
    address,
    broadcast_operand,
    on,
    why_not_dtype,
)
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions

__all__ = ["memory_hop_attention", "memory_hop_attention_backward", "why_not"]

_MAX_WIDTH: int = _cuda.max_hop_width
_Operand = tuple[int, tuple[int, ...]]


def why_not(query: Tensor, in_memory: Tensor, *, options: MemoryHopOptions, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    reasons = why_not_dtype(query.dtype)
    width = query.shape[-1]
    if width > _MAX_WIDTH:
        reasons.append(f"a memory has {width} columns; the kernels take up to {_MAX_WIDTH}")
    if max(query.shape[:-1].numel() * (options.hops + 1), in_memory.shape[-2]) > MAX_LENGTH // 2:
        reasons.append(f"the queries times hops, or the rows, are more than {MAX_LENGTH // 2}")
    return reasons


def memory_hop_attention(
    query: Tensor,  # [B, D] or [B, Q, D]
    in_memory: Tensor,  # [B|1, N, D] or [B|1, K, N, D]; [B|1, K+1, N, D] where out_memory is None
    out_memory: Tensor | None,  # [B|1, N, D] or [B|1, K, N, D]
    hop_proj: Tensor | None,  # [D, D] or [K, D, D]
    memory_mask: Tensor | None,  # [B|1, Q|1, K|1, N|1]
    memory_bias: Tensor | None,  # [B|1, Q|1, K|1, N|1]
    *,
    options: MemoryHopOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ``(out, trace, stats, weights)``, see ``docs/design.md``."""
    *lead, width = query.shape
    hops, rows = options.hops, in_memory.shape[-2]
    out = query.new_empty((*lead, width))
    trace = query.new_empty((*lead, 2 * hops + 1, width), dtype=torch.float32)
    stats = query.new_empty((*lead, hops, 2), dtype=torch.float32)
    applied = query.new_empty((*lead, hops, rows)) if options.weights else None
    partial = _partial(query, rows)
    scores = None
    if partial is not None:
        trace.select(-2, 0).copy_(query)
        scores = query.new_empty((*lead, rows), dtype=torch.float32) if options.weights else None
    memories = memories_of(in_memory, out_memory, hop_proj)
    with on(query) as stream:
        _cuda.memory_hops_forward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, hops, rows),
            _flags(in_memory, out_memory),
            options,
            0 if memory_bias is None else DTYPES[memory_bias.dtype],
            _operands(query, *memories, memory_mask, memory_bias),
            (*map(address, (trace, stats, partial, scores)), 0),
            (out.data_ptr(), address(applied)),
        )
    return out, trace, stats, applied


def memory_hop_attention_backward(
    grad_out: Tensor | None,  # as query
    grad_weights: Tensor | None,  # [B, K, N] or [B, Q, K, N]
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    trace: Tensor,
    stats: Tensor,
    *,
    options: MemoryHopBackwardOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of query, memories, hop_proj and bias, see ``docs/design.md``."""
    *lead, width = query.shape
    hops, needed = options.hops, options.needed
    batch, queries, _, rows, _ = sizes = _sizes(query, hops, in_memory.shape[-2])
    stack = out_memory is None and in_memory.ndim == 4
    grad_query = query.new_empty((*lead, width))
    grad_in, grad_out_memory, grad_proj = (
        x.new_empty(x.shape) if x is not None and needed & bit else None
        for bit, x in ((2, in_memory), (4, out_memory), (8, hop_proj))
    )
    slots = hops + 1 if stack else hops
    xs = query.new_empty((2, batch, queries, slots, rows), dtype=torch.float32)
    ys = query.new_empty((2, batch, queries, slots, width), dtype=torch.float32)
    if stack:  # the first memory is never an output memory, the last one never an input memory
        for x in (xs, ys):
            x[0, :, :, hops] = 0
            x[1, :, :, 0] = 0
    results = (xs, ys, grad_query, grad_in, grad_out_memory, grad_proj)
    if batch * queries == 0:  # the kernels write nothing then
        for result in results:
            if result is not None:
                result.zero_()
    if not options.weights:
        grad_weights = None
    if len(lead) == 1:
        grad_weights = None if grad_weights is None else grad_weights.unsqueeze(1)
        grad_out = None if grad_out is None else grad_out.unsqueeze(1)
    partial = _partial(query, rows)
    memories = memories_of(in_memory, out_memory, hop_proj)
    with on(query) as stream:
        _cuda.memory_hops_backward(
            DTYPES[query.dtype],
            stream,
            sizes,
            _flags(in_memory, out_memory),
            options,
            0 if memory_bias is None else DTYPES[memory_bias.dtype],
            _operands(query, *memories, memory_mask, memory_bias),
            (*map(address, (trace, stats, partial)), 0, 0),
            (
                None if grad_out is None else broadcast_operand(grad_out.unsqueeze(2)),
                None if grad_weights is None else broadcast_operand(grad_weights),
            ),
            tuple(map(address, results)),
            (_own(in_memory, 4), _own(out_memory, 4), _own(hop_proj, 3)),
            tuple(x is not None and x.shape[0] == 1 for x in (in_memory, out_memory)),
        )
    grad_bias = None
    if needed & 16 and memory_bias is not None:
        grad_bias = summed(xs[0, :, :, :hops], memory_bias)
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias


def summed(scores: Tensor, bias: Tensor) -> Tensor:
    """Sum [B, Q, K, N] to the shape of a bias, in float64, because there may be many terms."""
    dims = [n for n, size in enumerate(bias.shape) if size == 1 and scores.shape[n] != 1]
    if dims:
        scores = scores.sum(dims, keepdim=True, dtype=torch.float64)
    return scores.to(bias.dtype)


def _sizes(query: Tensor, hops: int, rows: int) -> tuple[int, int, int, int, int]:
    batch, *queries, width = query.shape
    return batch, queries[0] if queries else 1, hops, rows, width


def _partial(query: Tensor, rows: int) -> Tensor | None:
    """The partial results of the splits of a long memory; None if one block takes a whole query."""
    if rows <= _cuda.hop_rows_of_block:
        return None
    splits = -(-rows // _cuda.hop_rows_of_split)
    shape = (query.shape[:-1].numel(), splits, query.shape[-1] + 2)
    return query.new_empty(shape, dtype=torch.float32)


def _flags(in_memory: Tensor, out_memory: Tensor | None) -> tuple[bool, bool]:
    """Whether the memories are the same rows, and whether they are a stack."""
    same_rows = out_memory is None and in_memory.ndim == 3
    return same_rows, out_memory is None and not same_rows


def memories_of(
    in_memory: Tensor, out_memory: Tensor | None, hop_proj: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands with contiguous columns: memories [B|1, -, N, D], H [-, D, D]."""
    m = with_columns_together(in_memory if in_memory.ndim == 4 else in_memory.unsqueeze(1))
    if out_memory is not None:
        c = with_columns_together(out_memory if out_memory.ndim == 4 else out_memory.unsqueeze(1))
    else:  # the next memory of a stack, or the only one
        c = m[:, 1:] if in_memory.ndim == 4 else m
    if hop_proj is not None:
        hop_proj = with_columns_together(hop_proj if hop_proj.ndim == 3 else hop_proj.unsqueeze(0))
    return m, c, hop_proj


def with_columns_together(x: Tensor) -> Tensor:
    """Return x with contiguous columns. A copy of a broadcast batch has one entry."""
    if x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    if x.ndim == 4 and x.stride(0) == 0 and x.shape[0] > 1:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _own(x: Tensor | None, ndim: int) -> int:
    """The number of slots of an operand: one for all hops, or one per hop."""
    return 1 if x is None or x.ndim < ndim else x.shape[-3]


def _operands(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor,
    hop_proj: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[_Operand | None, ...]:
    query = query.unsqueeze(-2) if query.ndim == 3 else query[:, None, None]
    return (
        broadcast_operand(query),
        rows_of(in_memory),
        rows_of(out_memory),
        None if hop_proj is None else rows_of(hop_proj.unsqueeze(0)),
        None if mask is None else broadcast_operand(mask),
        None if bias is None else broadcast_operand(bias),
    )


def rows_of(memory: Tensor) -> _Operand:
    """[B|1, K|1, N, D] as [B, K, N, D]; a single column counts as contiguous."""
    address, (batch, hop, row, _) = broadcast_operand(memory)
    return address, (batch, hop, row, 1)
