"""The adapter of the memory hops: from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._alloc import summed_to
from fastattn.backends._memories import one_memory, with_rows
from fastattn.backends._operands import Operand, address, broadcast_operand, operand
from fastattn.backends.cpu.operands import DTYPES, accumulator
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions


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
    in_memory, out_memory = with_rows(in_memory), with_rows(out_memory)
    hop_proj = with_rows(hop_proj)
    m, c = _memory(in_memory), None if out_memory is None else _memory(out_memory)
    shared = one_memory(in_memory) and (out_memory is None or one_memory(out_memory))
    hops, rows = options.hops, in_memory.shape[-2]
    out = torch.empty((*lead, width), dtype=dtype, device="cpu")  # contiguous, unlike empty_like's
    trace = torch.empty((*lead, 2 * hops + 1, width), dtype=wide, device="cpu")
    stats = torch.empty((*lead, hops, 2), dtype=wide, device="cpu")
    applied = (
        torch.empty((*lead, hops, rows), dtype=dtype, device="cpu") if options.weights else None
    )
    _cpu.memory_hops_forward(
        DTYPES[dtype],
        torch.get_num_threads(),
        (lead[0], lead[1] if len(lead) == 2 else 1, hops, rows, width),
        options,
        hop_operands(query, m, c, hop_proj, trace, stats, shared),
        hop_biases(memory_mask, memory_bias),
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
    batch, queries = lead[0], lead[1] if len(lead) == 2 else 1
    dtype = query.dtype
    in_memory, out_memory = with_rows(in_memory), with_rows(out_memory)
    hop_proj = with_rows(hop_proj)
    m, c = _memory(in_memory), None if out_memory is None else _memory(out_memory)
    shared = in_memory.shape[0] == 1 and (out_memory is None or out_memory.shape[0] == 1)
    memories = 1 if shared else batch
    hops, rows, needed = options.hops, in_memory.shape[-2], options.needed
    grad_query = torch.empty((*lead, width), dtype=dtype, device="cpu")
    grad_in = grad_out_memory = grad_proj = grad_bias = scores = states = None
    if needed & 2:
        grad_in = torch.empty((memories, *in_memory.shape[1:]), dtype=dtype, device="cpu")
    if needed & 4 and out_memory is not None:
        grad_out_memory = torch.empty((memories, *out_memory.shape[1:]), dtype=dtype, device="cpu")
    if needed & 8 and hop_proj is not None:
        grad_proj = torch.empty(hop_proj.shape, dtype=dtype, device="cpu")
        states = torch.empty((batch, queries, hops, width), dtype=trace.dtype, device="cpu")
    if needed & 16 and memory_bias is not None:
        scores = torch.empty((batch, queries, hops, rows), dtype=trace.dtype, device="cpu")
    results = (grad_query, grad_in, grad_out_memory, grad_proj, scores, states)
    if batch * queries == 0:  # the kernel writes nothing then
        for result in results:
            if result is not None:
                result.zero_()
    if not options.weights:
        grad_weights = None
    elif grad_weights is not None and len(lead) == 1:
        grad_weights = grad_weights.unsqueeze(1)
    _cpu.memory_hops_backward(
        DTYPES[dtype],
        torch.get_num_threads(),
        (batch, queries, hops, rows, width),
        options,
        hop_operands(query, m, c, hop_proj, trace, stats, shared),
        hop_biases(memory_mask, memory_bias),
        {
            "grad_out": None if grad_out is None else vectors(grad_out),
            "grad_weights": None if grad_weights is None else operand(grad_weights),
            "grad_query": grad_query.data_ptr(),
            "grad_in": address(grad_in),
            "grad_out_memory": address(grad_out_memory),
            "grad_proj": address(grad_proj),
            "grad_scores": address(scores),
            "grad_states": address(states),
        },
    )
    if not shared:  # one of the two memories may be shared by the batch
        grad_in = _reduced(grad_in, in_memory)
        grad_out_memory = _reduced(grad_out_memory, out_memory)
    if scores is not None and memory_bias is not None:
        grad_bias = summed_to(memory_bias, scores)
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias


def plain_hops_call(query: Any, in_memory: Any, out_memory: Any, mask: Any, hops: int) -> int:
    """Return a number that is the same for calls of one dtype, or 0: take the general path.

    It is odd if a tensor requires a gradient. If it is not 0, all are plain tensors of the CPU:
    query [B, D], memories with contiguous rows and a batch dimension of their own, each [B, N, D]
    or one a hop, [B, K, N, D], and a boolean mask [B, N] or None.
    """
    return _cpu.plain_hops_call(query, in_memory, out_memory, mask, hops)


def plain_hops(
    query: Tensor,  # [B, D]
    in_memory: Tensor,  # [B, N, D] or [B, K, N, D]; [B, K+1, N, D] where out_memory is None
    out_memory: Tensor | None,
    mask: Tensor | None,  # [B, N]
    hops: int,
    scale: float,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, kept)`` of a call without other options: the result, and what the backward
    reads: the trace of all examples, then their statistics and, of short memories, their weights.
    """
    threads = torch.get_num_threads()
    return _cpu.plain_hops(query, in_memory, out_memory, mask, hops, scale, differentiable, threads)


def plain_hops_backward(
    grad_out: Tensor,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    mask: Tensor | None,
    kept: Tensor,
    hops: int,
    scale: float,
    wants: Sequence[bool],  # the gradients of query and of the memories
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return the gradients of query, in_memory and out_memory of :func:`plain_hops`, or None: the
    general path has to compute them.
    """
    operands = query, in_memory, out_memory, mask, kept
    _, wants_in, wants_out, *_ = wants
    threads = torch.get_num_threads()
    return _cpu.plain_hops_backward(grad_out, *operands, hops, scale, wants_in, wants_out, threads)


def hop_operands(
    query: Tensor,
    in_memory: Operand,
    out_memory: Operand | None,  # None: the next memory of a stack, or in_memory itself
    hop_proj: Tensor | None,
    trace: Tensor,
    stats: Tensor,
    shared: bool,  # by the whole batch
) -> dict[str, Any]:
    """The named operands of a call; the columns of memories and projections are contiguous."""
    return {
        "query": (query.data_ptr(), query.stride()),
        "in_memory": in_memory,
        "out_memory": out_memory,
        "hop_proj": None if hop_proj is None else operand(hop_proj),
        "trace": trace.data_ptr(),
        "stats": stats.data_ptr(),
        "shared": shared,
    }


def hop_biases(mask: Tensor | None, bias: Tensor | None) -> dict[str, Any] | None:
    """A mask and a bias that broadcast to [B, Q, K, N], as named operands; None without both."""
    if mask is None and bias is None:
        return None
    return {
        "mask": None if mask is None else broadcast_operand(mask),
        "bias": None if bias is None else broadcast_operand(bias),
        "bias_dtype": 0 if bias is None else DTYPES[bias.dtype],
    }


def vectors(x: Tensor) -> Operand:
    """[B, D] or [B, Q, D] as [B, Q, -, D]."""
    stride = x.stride()
    return x.data_ptr(), (stride[0], stride[1] if len(stride) == 3 else 0, 0, stride[-1])


def _memory(x: Tensor) -> Operand:
    """The operand of a memory [B|1, ...]; a single entry is read for the whole batch."""
    strides = x.stride()
    return x.data_ptr(), (0, *strides[1:]) if x.shape[0] == 1 else strides


def _reduced(grad: Tensor | None, memory: Tensor | None) -> Tensor | None:
    if grad is None or memory is None or memory.shape[0] == grad.shape[0]:
        return grad
    return grad.sum(0, keepdim=True)
