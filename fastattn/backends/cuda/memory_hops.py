"""The memory hops on the CUDA kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import summed_to
from fastattn.backends._memories import with_rows
from fastattn.backends._operands import address, broadcast_operand
from fastattn.backends.cuda.operands import DTYPES, MAX_LENGTH, on, why_not_dtype
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions

__all__ = ["memory_hop_attention", "memory_hop_attention_backward", "why_not"]

_MAX_WIDTH: int = _cuda.max_hop_width


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
    memories = with_rows(in_memory), with_rows(out_memory), with_rows(hop_proj)
    with on(query) as stream:
        _cuda.memory_hops_forward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, hops, rows),
            options,
            hop_operands(
                query,
                *memories,
                memory_mask,
                memory_bias,
                trace=trace,
                stats=stats,
                partial=partial,
                scores=scores,
            ),
            {"out": out.data_ptr(), "weights": address(applied)},
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
    # The gradients of a batch of calls share them, with stride 0; the kernels read them in order.
    trace, stats = trace.contiguous(), stats.contiguous()
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
    if batch * queries == 0:  # the kernels write nothing then
        for result in (xs, ys, grad_query, grad_in, grad_out_memory, grad_proj):
            if result is not None:
                result.zero_()
    if not options.weights:
        grad_weights = None
    if len(lead) == 1:
        grad_weights = None if grad_weights is None else grad_weights.unsqueeze(1)
        grad_out = None if grad_out is None else grad_out.unsqueeze(1)
    partial = _partial(query, rows)
    memories = with_rows(in_memory), with_rows(out_memory), with_rows(hop_proj)
    with on(query) as stream:
        _cuda.memory_hops_backward(
            DTYPES[query.dtype],
            stream,
            sizes,
            options,
            hop_operands(
                query,
                *memories,
                memory_mask,
                memory_bias,
                trace=trace,
                stats=stats,
                partial=partial,
            ),
            {
                "grad_out": None if grad_out is None else broadcast_operand(grad_out.unsqueeze(2)),
                "grad_weights": None if grad_weights is None else broadcast_operand(grad_weights),
                "grad_query": grad_query.data_ptr(),
                "grad_in": address(grad_in),
                "grad_out_memory": address(grad_out_memory),
                "grad_proj": address(grad_proj),
                "xs": xs.data_ptr(),
                "ys": ys.data_ptr(),
                "in_of_batch": in_memory.shape[0] == 1,
                "out_of_batch": out_memory is not None and out_memory.shape[0] == 1,
            },
        )
    grad_bias = None
    if needed & 16 and memory_bias is not None:
        grad_bias = summed_to(memory_bias, xs[0, :, :, :hops])
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias


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


def hop_operands(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,  # None: the next memory of a stack, or in_memory itself
    hop_proj: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    trace: Tensor,
    stats: Tensor | None = None,
    partial: Tensor | None = None,
    scores: Tensor | None = None,
    taken: Tensor | None = None,
) -> dict[str, Any]:
    """The named operands of a call; the columns of memories and projections are contiguous."""
    tensors = {
        "query": query,
        "in_memory": in_memory,
        "out_memory": out_memory,
        "hop_proj": hop_proj,
        "mask": mask,
        "bias": bias,
    }
    return {
        **{name: None if x is None else broadcast_operand(x) for name, x in tensors.items()},
        "bias_dtype": 0 if bias is None else DTYPES[bias.dtype],
        "trace": trace.data_ptr(),
        "stats": address(stats),
        "partial": address(partial),
        "scores": address(scores),
        "taken": address(taken),
    }
