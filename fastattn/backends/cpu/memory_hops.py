"""The adapter of the memory hops: from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.cpu.operands import DTYPES, accumulator, broadcast_operand
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions

_SHARED, _SAME_ROWS, _STACK = 1, 2, 4
_NO_SLOTS = (1, 1, 1)

_Operand = tuple[int, tuple[int, ...]]


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
    dtype = query.dtype
    wide = accumulator(dtype)
    in_memory, out_memory = _with_rows(in_memory), _with_rows(out_memory)
    hop_proj = _with_rows(hop_proj)
    shared = _one_memory(in_memory) and (out_memory is None or _one_memory(out_memory))
    hops, rows = options.hops, in_memory.shape[-2]
    out = torch.empty((*lead, width), dtype=dtype)  # contiguous, unlike empty_like's
    trace = torch.empty((*lead, 2 * hops + 1, width), dtype=wide)
    stats = torch.empty((*lead, hops, 2), dtype=wide)
    applied = torch.empty((*lead, hops, rows), dtype=dtype) if options.weights else None
    _cpu.memory_hops(
        False,
        DTYPES[dtype],
        torch.get_num_threads(),
        (lead[0], lead[1] if len(lead) == 2 else 1, hops, rows, width),
        _flags(in_memory, out_memory, shared),
        options,
        0 if memory_bias is None else DTYPES[memory_bias.dtype],
        _operands(query, in_memory, out_memory, hop_proj, memory_mask, memory_bias),
        (
            out.data_ptr(),
            trace.data_ptr(),
            stats.data_ptr(),
            0 if applied is None else applied.data_ptr(),
        ),
        _NO_SLOTS,
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
    batch, queries = lead[0], lead[1] if len(lead) == 2 else 1
    dtype = query.dtype
    in_memory, out_memory = _with_rows(in_memory), _with_rows(out_memory)
    hop_proj = _with_rows(hop_proj)
    shared = in_memory.shape[0] == 1 and (out_memory is None or out_memory.shape[0] == 1)
    memories = 1 if shared else batch
    hops, rows, needed = options.hops, in_memory.shape[-2], options.needed
    grad_query = torch.empty((*lead, width), dtype=dtype)
    grad_in = grad_out_memory = grad_proj = grad_bias = scores = states = None
    if needed & 2:
        grad_in = torch.empty((memories, *in_memory.shape[1:]), dtype=dtype)
    if needed & 4 and out_memory is not None:
        grad_out_memory = torch.empty((memories, *out_memory.shape[1:]), dtype=dtype)
    if needed & 8 and hop_proj is not None:
        grad_proj = torch.empty(hop_proj.shape, dtype=dtype)
        states = torch.empty((batch, queries, hops, width), dtype=trace.dtype)
    if needed & 16 and memory_bias is not None:
        scores = torch.empty((batch, queries, hops, rows), dtype=trace.dtype)
    results = (grad_query, grad_in, grad_out_memory, grad_proj, scores, states)
    if batch * queries == 0:  # the kernel writes nothing then
        for result in results:
            if result is not None:
                result.zero_()
    if not options.weights:
        grad_weights = None
    elif grad_weights is not None and len(lead) == 1:
        grad_weights = grad_weights.unsqueeze(1)
    _cpu.memory_hops(
        True,
        DTYPES[dtype],
        torch.get_num_threads(),
        (batch, queries, hops, rows, width),
        _flags(in_memory, out_memory, shared),
        options,
        0 if memory_bias is None else DTYPES[memory_bias.dtype],
        (
            *_operands(query, in_memory, out_memory, hop_proj, memory_mask, memory_bias),
            None if grad_out is None else _vectors(grad_out),
            None if grad_weights is None else (grad_weights.data_ptr(), grad_weights.stride()),
        ),
        (
            0,
            trace.data_ptr(),
            stats.data_ptr(),
            0,
            *[0 if result is None else result.data_ptr() for result in results],
        ),
        (
            in_memory.shape[1] if in_memory.ndim == 4 else 1,
            out_memory.shape[1] if out_memory is not None and out_memory.ndim == 4 else 1,
            hop_proj.shape[0] if hop_proj is not None and hop_proj.ndim == 3 else 1,
        ),
    )
    if not shared:  # one of the two memories may be shared by the batch
        grad_in = _reduced(grad_in, in_memory)
        grad_out_memory = _reduced(grad_out_memory, out_memory)
    if scores is not None and memory_bias is not None:
        grad_bias = _summed(scores, memory_bias)
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias


def plain_hops(
    query: Tensor,  # [B, D]
    in_memory: Tensor,  # [B, N, D] or [B, K, N, D]; [B, K+1, N, D] where out_memory is None
    out_memory: Tensor | None,
    mask: Tensor | None,  # [B, N]
    hops: int,
    scale: float,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, trace, stats)`` of a call without other options, with the least Python."""
    batch, width = query.shape
    dtype = query.dtype
    wide = accumulator(dtype)
    out = torch.empty((batch, width), dtype=dtype)
    trace = torch.empty((batch, 2 * hops + 1, width), dtype=wide)
    stats = torch.empty((batch, hops, 2), dtype=wide)
    _cpu.memory_hops(
        False,
        DTYPES[dtype],
        torch.get_num_threads(),
        (batch, 1, hops, in_memory.shape[-2], width),
        _flags(in_memory, out_memory, False),
        scale,
        0,
        _plain_operands(query, in_memory, out_memory, mask),
        (out.data_ptr(), trace.data_ptr(), stats.data_ptr(), 0),
        _NO_SLOTS,
    )
    return out, trace, stats


def plain_hops_backward(
    grad_out: Tensor,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    mask: Tensor | None,
    trace: Tensor,
    stats: Tensor,
    hops: int,
    scale: float,
    wants: Sequence[bool],  # the gradients of query and of the memories
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, in_memory and out_memory of :func:`plain_hops`."""
    batch, width = query.shape
    dtype = query.dtype
    grad_query = torch.empty((batch, width), dtype=dtype)
    grad_in = torch.empty(in_memory.shape, dtype=dtype) if wants[1] else None
    grad_out_memory = None
    if out_memory is not None and wants[2]:
        grad_out_memory = torch.empty(out_memory.shape, dtype=dtype)
    _cpu.memory_hops(
        True,
        DTYPES[dtype],
        torch.get_num_threads(),
        (batch, 1, hops, in_memory.shape[-2], width),
        _flags(in_memory, out_memory, False),
        scale,
        0,
        (*_plain_operands(query, in_memory, out_memory, mask), _vectors(grad_out), None),
        (
            0,
            trace.data_ptr(),
            stats.data_ptr(),
            0,
            grad_query.data_ptr(),
            0 if grad_in is None else grad_in.data_ptr(),
            0 if grad_out_memory is None else grad_out_memory.data_ptr(),
            0,
            0,
            0,
        ),
        (
            in_memory.shape[1] if in_memory.dim() == 4 else 1,
            out_memory.shape[1] if out_memory is not None and out_memory.dim() == 4 else 1,
            1,
        ),
    )
    return grad_query, grad_in, grad_out_memory


def _plain_operands(
    query: Tensor, in_memory: Tensor, out_memory: Tensor | None, mask: Tensor | None
) -> tuple[_Operand | None, ...]:
    m = _memory(in_memory)
    if out_memory is not None:
        c = _memory(out_memory)
    else:  # the next memory of a stack, or the only one
        c = m[0] + m[1][1] * in_memory.element_size(), m[1]
    seen = None
    if mask is not None:
        stride = mask.stride()
        seen = mask.data_ptr(), (stride[0], 0, 0, stride[1])
    return _vectors(query), m, c, None, seen, None


def _with_rows(x: Any) -> Any:
    """Return x with contiguous rows. A copy of a broadcast batch has one entry."""
    if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    if x.ndim > 2 and x.stride(0) == 0 and x.shape[0] > 1:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _one_memory(memory: Tensor) -> bool:
    """Whether the whole batch shares one memory."""
    return memory.shape[0] == 1 or memory.stride(0) == 0


def _flags(in_memory: Tensor, out_memory: Tensor | None, shared: bool) -> int:
    flags = _SHARED if shared else 0
    if out_memory is not None:
        return flags
    return flags | (_STACK if in_memory.dim() == 4 else _SAME_ROWS)


def _operands(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[_Operand | None, ...]:
    m = _memory(in_memory)
    if out_memory is not None:
        c = _memory(out_memory)
    else:  # the next memory of a stack, or the only one
        c = (m[0] + m[1][1] * in_memory.element_size(), m[1])
    proj = None
    if hop_proj is not None:
        stride = hop_proj.stride()
        proj = (hop_proj.data_ptr(), (0, stride[0] if len(stride) == 3 else 0, stride[-2], 1))
    return (
        _vectors(query),
        m,
        c,
        proj,
        None if mask is None else broadcast_operand(mask),
        None if bias is None else broadcast_operand(bias),
    )


def _vectors(x: Tensor) -> _Operand:
    """[B, D] or [B, Q, D] as [B, Q, -, D]."""
    stride = x.stride()
    return x.data_ptr(), (stride[0], stride[1] if len(stride) == 3 else 0, 0, stride[-1])


def _memory(x: Tensor) -> _Operand:
    """[B|1, N, D] or [B|1, K, N, D] as [B, K, N, D]."""
    batch, *hop, row, _ = x.stride()
    return x.data_ptr(), (0 if x.shape[0] == 1 else batch, hop[0] if hop else 0, row, 1)


def _reduced(grad: Tensor | None, memory: Tensor | None) -> Tensor | None:
    if grad is None or memory is None or memory.shape[0] == grad.shape[0]:
        return grad
    return grad.sum(0, keepdim=True)


def _summed(scores: Tensor, bias: Tensor) -> Tensor:
    """Sum [B, Q, K, N] to the shape of a bias, in float64, because there may be many terms."""
    dims = [n for n, size in enumerate(bias.shape) if size == 1 and scores.shape[n] != 1]
    if dims:
        scores = scores.sum(dims, keepdim=True, dtype=torch.float64)
    return scores.to(bias.dtype)
