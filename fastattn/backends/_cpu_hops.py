"""The adapter of the memory hops: from tensors to addresses and strides, see ``cpu.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
}
_ACTIVATIONS = {"none": 0, "relu": 1, "tanh": 2, "sigmoid": 3}
_SHARED, _SAME_ROWS, _STACK, _NORMALIZE = 1, 2, 4, 8

_Operand = tuple[int, tuple[int, ...]]


def memory_hop_attention(
    query: Tensor,  # [B, Q, D]
    in_memory: Tensor,  # [B|1, 1|K|K+1, N, D]
    out_memory: Tensor | None = None,  # [B|1, 1|K, N, D]
    hop_proj: Tensor | None = None,  # [1|K, D, D]
    memory_mask: Tensor | None = None,  # [B|1, Q|1, K|1, N|1]
    memory_bias: Tensor | None = None,  # [B|1, Q|1, K|1, N|1]
    *,
    hops: int,
    activation: str,
    normalize: str,
    scale: float,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, trace, stats, weights)``, see ``docs/design.md``."""
    batch, queries, width = query.shape
    rows = in_memory.shape[2]
    dtype = query.dtype
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    out = torch.empty((batch, queries, width), dtype=dtype)
    trace = torch.empty((batch, queries, 2 * hops + 1, width), dtype=compute)
    stats = torch.empty((batch, queries, hops, 2), dtype=compute)
    applied = torch.empty((batch, queries, hops, rows) if weights else (0,), dtype=dtype)
    in_memory, out_memory = _with_rows(in_memory), _with_rows(out_memory)
    hop_proj = _with_rows(hop_proj)
    _cpu.memory_hops(
        False,
        _DTYPES[dtype],
        torch.get_num_threads(),
        (batch, queries, hops, rows, width),
        _flags(in_memory, out_memory, normalize, _is_shared(in_memory, out_memory)),
        _ACTIVATIONS[activation],
        scale,
        0 if memory_bias is None else _DTYPES[memory_bias.dtype],
        (
            *_operands(query, in_memory, out_memory, hop_proj, memory_mask, memory_bias),
            None,
            None,
        ),
        (
            out.data_ptr(),
            trace.data_ptr(),
            stats.data_ptr(),
            applied.data_ptr() if weights else 0,
            0,
            0,
            0,
            0,
            0,
            0,
        ),
        1,
        1,
        1,
    )
    return out, trace, stats, applied


def memory_hop_attention_backward(
    grad_out: Tensor | None,  # [B, Q, D]
    grad_weights: Tensor | None,  # [B, Q, K, N]
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    trace: Tensor,
    stats: Tensor,
    *,
    hops: int,
    activation: str,
    normalize: str,
    scale: float,
    weights: bool,
    needed: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of query, memories, hop_proj and bias, see ``docs/design.md``."""
    batch, queries, width = query.shape
    rows = in_memory.shape[2]
    dtype = query.dtype
    in_memory, out_memory = _with_rows(in_memory), _with_rows(out_memory)
    hop_proj = _with_rows(hop_proj)
    shared = in_memory.shape[0] == 1 and (out_memory is None or out_memory.shape[0] == 1)
    memories = 1 if shared else batch
    grad_query = torch.empty((batch, queries, width), dtype=dtype)
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
    if batch * queries == 0:  # then the kernel has nothing to write
        for result in results:
            if result is not None:
                result.zero_()
    _cpu.memory_hops(
        True,
        _DTYPES[dtype],
        torch.get_num_threads(),
        (batch, queries, hops, rows, width),
        _flags(in_memory, out_memory, normalize, shared),
        _ACTIVATIONS[activation],
        scale,
        0 if memory_bias is None else _DTYPES[memory_bias.dtype],
        (
            *_operands(query, in_memory, out_memory, hop_proj, memory_mask, memory_bias),
            None if grad_out is None else _vectors(grad_out),
            None if grad_weights is None else _broadcast(grad_weights),
        ),
        (
            0,
            trace.data_ptr(),
            stats.data_ptr(),
            0,
            *(0 if result is None else result.data_ptr() for result in results),
        ),
        in_memory.shape[1],
        1 if out_memory is None else out_memory.shape[1],
        1 if hop_proj is None else hop_proj.shape[0],
    )
    if not shared:  # one of two memories is common to the batch
        grad_in = _reduced(grad_in, in_memory)
        grad_out_memory = _reduced(grad_out_memory, out_memory)
    if scores is not None and memory_bias is not None:
        grad_bias = _summed(scores, memory_bias)
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias


def _with_rows(x: Any) -> Any:
    """The kernel's rows are contiguous; others are copied, but not once for each of a batch."""
    if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    if x.ndim == 4 and x.stride(0) == 0 and x.shape[0] > 1:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _is_shared(*memories: Tensor | None) -> bool:
    """One memory for all of the batch, in and out."""
    return all(m is None or m.shape[0] == 1 or m.stride(0) == 0 for m in memories)


def _flags(in_memory: Tensor, out_memory: Tensor | None, normalize: str, shared: bool) -> int:
    flags = _SHARED if shared else 0
    if out_memory is None:
        flags |= _STACK if in_memory.shape[1] > 1 else _SAME_ROWS
    return flags | _NORMALIZE if normalize == "softmax" else flags


def _operands(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[_Operand | None, ...]:
    m = _broadcast(in_memory)
    if out_memory is not None:
        c = _broadcast(out_memory)
    else:  # the next memory of a stack, or the only one
        c = (m[0] + m[1][1] * in_memory.element_size(), m[1])
    return (
        _vectors(query),
        m,
        c,
        None if hop_proj is None else _broadcast(hop_proj.unsqueeze(0)),
        None if mask is None else _broadcast(mask),
        None if bias is None else _broadcast(bias),
    )


def _vectors(x: Tensor) -> _Operand:
    """[B, Q, D] as [B, Q, -, D]."""
    batch, query, width = x.stride()
    return x.data_ptr(), (batch, query, 0, width)


def _broadcast(x: Tensor) -> _Operand:
    """A dimension of size one is read with stride 0."""
    shape, stride = x.shape, x.stride()
    if 1 not in shape:
        return x.data_ptr(), stride
    return x.data_ptr(), tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))


def _reduced(grad: Tensor | None, memory: Tensor | None) -> Tensor | None:
    if grad is None or memory is None or memory.shape[0] == grad.shape[0]:
        return grad
    return grad.sum(0, keepdim=True)


def _summed(scores: Tensor, bias: Tensor) -> Tensor:
    """[B, Q, K, N] in the shape of a bias, thousands of terms perhaps: in float64."""
    dims = [n for n, size in enumerate(bias.shape) if size == 1 and scores.shape[n] != 1]
    if dims:
        scores = scores.sum(dims, keepdim=True, dtype=torch.float64)
    return scores.to(bias.dtype)
