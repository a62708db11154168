"""Memory hops on Triton: the launches of each primitive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import summed_to
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.backends.triton._core import Operand
from fastattn.backends.triton._launch import block_of, launch, operand, plan, precision
from fastattn.backends.triton._memory_hops_kernels import (
    Hops,
    hops_backward_memory,
    hops_backward_query,
    hops_forward,
)


def memory_hop_attention(
    query: Tensor,  # [B, D] or [B, Q, D]
    in_memory: Tensor,  # [B|1, N, D] or [B|1, K, N, D]; [B|1, K+1, N, D] where out_memory is None
    out_memory: Tensor | None,  # [B|1, N, D] or [B|1, K, N, D]
    hop_proj: Tensor | None,  # [D, D] or [K, D, D]
    memory_mask: Tensor | None,  # [B|1, Q|1, K|1, N|1]
    memory_bias: Tensor | None,  # [B|1, Q|1, K|1, N|1]
    *,
    options: MemoryHopOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, trace, stats, weights)``, see ``docs/design.md``."""
    *lead, _ = query.shape
    shared = all(x is None or _is_one(x) for x in (in_memory, out_memory))
    tensors = (query, in_memory, out_memory, memory_mask, memory_bias)
    o = options_of(*tensors, options, shared=shared)
    applied = query.new_empty((*lead, o.hops, o.rows) if options.weights else 0)
    weights = applied if options.weights else None
    return *run_forward(query, o, options, weights, hop_proj), applied


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
    shared = in_memory.shape[0] == 1 and (out_memory is None or out_memory.shape[0] == 1)
    tensors = (query, in_memory, out_memory, memory_mask, memory_bias)
    o = options_of(*tensors, options, shared=shared)
    if options.weights and grad_weights is not None:
        grad_weights = grad_weights if query.ndim == 3 else grad_weights.unsqueeze(1)
        o = o._replace(grad_weights=operand(grad_weights))
    needs_scores = memory_bias is not None and bool(options.needed & 16)
    grad_query, memories, grads, scores = run_backward(
        grad_out, query, in_memory, out_memory, o, trace, stats, options, needs_scores, hop_proj
    )
    grad_proj = grad_bias = None
    if hop_proj is not None and options.needed & 8:
        states = trace[..., : 2 * o.hops : 2, :]
        equation = "rki,rkj->kij" if hop_proj.ndim == 3 else "rki,rkj->ij"
        factors = (x.reshape(-1, o.hops, query.shape[-1]) for x in (grads, states))
        grad_proj = torch.einsum(equation, *factors).to(hop_proj.dtype)
    if scores is not None and memory_bias is not None:
        grad_bias = summed_to(memory_bias, scores)
    return grad_query, *memories, grad_proj, grad_bias


def options_of(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    options: MemoryHopOptions,
    *,
    shared: bool,
) -> Hops:
    """``shared``: the whole batch reads one memory."""
    batch, queries = query.shape[0], query.shape[1] if query.ndim == 3 else 1
    input_memory = in_memory
    if out_memory is None:  # the next memory of a stack, or the only one
        out_memory = in_memory if in_memory.ndim == 3 else in_memory[:, 1:]
    return Hops(
        m=_memory(input_memory),
        c=_memory(out_memory),
        bool_mask=None if mask is None else operand(mask),
        added_mask=None if bias is None else operand(bias),
        grad_weights=None,
        queries=max(queries, 1),
        group=batch * queries if shared else queries,
        rows=in_memory.shape[-2],
        hops=options.hops,
        scale=options.scale,
        rescored=1,
    )


def run_forward(
    query: Tensor,
    o: Hops,
    options: MemoryHopOptions,
    applied: Tensor | None = None,
    hop_proj: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last state, all states, and the statistics of each hop."""
    *lead, width = query.shape
    out = query.new_empty((*lead, width))
    trace = query.new_empty((*lead, 2 * o.hops + 1, width), dtype=torch.float32)
    stats = query.new_empty((*lead, o.hops, 2), dtype=torch.float32)
    planned = plan("hops", query, block_of(width))
    first: Operand | None = _vectors(query)
    for hops in [(0, o.hops - 1)] if hop_proj is None else [(n, n) for n in range(o.hops)]:
        projected = None
        if hop_proj is not None:
            state = query.float() if hops[0] == 0 else trace[..., 2 * hops[0], :]
            projected = (state @ _of_hop(hop_proj, hops[0]).mT).contiguous()
        launch(
            hops_forward,
            planned,
            planned.q_tiles(o.group) * _groups(query, o),
            query.device,
            query=first,
            o=o,
            p_trace=trace,
            p_stats=stats,
            weights=None if applied is None else Operand(applied, 0, 0, 0, 0),
            p_out=out,
            p_projected=projected,
            first_hop=hops[0],
            last_hop=hops[1],
            ACTIVATION=options.activation,
            NORMALIZE=options.normalize == "softmax",
            **_widths(width),
        )
        first = None
    return out, trace, stats


def run_backward(
    grad_out: Tensor | None,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    o: Hops,
    trace: Tensor,
    stats: Tensor,
    options: MemoryHopBackwardOptions,
    needs_scores: bool,
    hop_proj: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor, Tensor | None]:
    """Return the gradients of the query, of the memories, of each hop's sum, and of the scores."""
    *lead, width = query.shape
    batch, queries = lead[0], lead[1] if len(lead) == 2 else 1
    groups = _groups(query, o)

    def float32(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    grad_query = query.new_empty((*lead, width))
    grads = float32(batch, queries, o.hops, width)
    delta = float32(batch, queries, o.hops)
    scores = float32(batch, queries, o.hops, o.rows) if needs_scores else None
    planned = plan("hops_backward", query, block_of(width))
    common: dict[str, Any] = {
        "o": o,
        "p_trace": trace.contiguous(),
        "p_stats": stats.contiguous(),
        "p_grads": grads,
        "p_delta": delta,
        "NORMALIZE": options.normalize == "softmax",
        **_widths(width),
    }
    grad_next = grad_out
    for hop_range in (
        [(0, o.hops - 1)] if hop_proj is None else [(n, n) for n in range(o.hops)][::-1]
    ):
        grad_memory = (
            grad_query if hop_range[0] == 0 and hop_proj is None else float32(*lead, width)
        )
        launch(
            hops_backward_query,
            planned,
            planned.q_tiles(o.group) * groups,
            query.device,
            **common,
            grad_out=None if grad_next is None else _vectors(grad_next),
            p_scores=scores,
            p_grad_query=grad_memory,
            first_hop=hop_range[0],
            last_hop=hop_range[1],
            PROJECTED=hop_proj is not None,
            ACTIVATION=options.activation,
        )
        if hop_proj is not None:
            grad_sum = grads[:, :, hop_range[0]].reshape(*lead, width)
            grad_next = grad_memory + grad_sum @ _of_hop(hop_proj, hop_range[0])
    if hop_proj is not None:
        assert grad_next is not None
        grad_query = grad_next.to(query.dtype)
    memories: list[Tensor | None] = [None, None]
    for n, memory in enumerate((in_memory, out_memory)):
        if memory is None or not options.needed >> (n + 1) & 1:
            continue
        memories[n] = grad_memory = memory.new_empty(memory.shape)
        slots = memory.shape[1] if memory.ndim == 4 else 1
        launch(
            hops_backward_memory,
            planned,
            planned.k_tiles(o.rows) * slots * memory.shape[0],
            query.device,
            **common,
            p_grad_memory=grad_memory,
            groups=groups,
            slots=slots,
            out_first=1 if out_memory is None else 0,
            READ=n == 0,
            WRITTEN=n == 1 or out_memory is None,
            SUMMED=memory.shape[0] == 1 and groups != 1,
        )
    return grad_query, (memories[0], memories[1]), grads, scores


def _is_one(memory: Tensor) -> bool:
    """Whether the whole batch shares one memory."""
    return memory.shape[0] == 1 or memory.stride(0) == 0


def _groups(query: Tensor, o: Hops) -> int:
    """The number of groups of queries that share a memory."""
    rows = query.shape[0] * (query.shape[1] if query.ndim == 3 else 1)
    return rows // max(o.group, 1) if rows else 0


def _of_hop(hop_proj: Tensor, hop: int) -> Tensor:
    """H_k in float32."""
    return (hop_proj if hop_proj.ndim == 2 else hop_proj[hop]).float()


def _widths(width: int) -> dict[str, Any]:
    """The width of a row, as arguments of a kernel."""
    return {"D": width, "BD": block_of(width), "PRECISION": precision()}


def _memory(x: Tensor) -> Operand:
    """[B|1, N, D] or [B|1, K, N, D] as [B, K, N, D]; the first is the same for every hop."""
    return operand(x if x.ndim == 4 else x.unsqueeze(1))


def _vectors(x: Tensor) -> Operand:
    """[B, D] or [B, Q, D] as [B, Q, -, D]."""
    return operand(x[:, None, None] if x.ndim == 2 else x.unsqueeze(2))
