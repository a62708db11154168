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
    shared = all(x is None or _is_shared(x) for x in (in_memory, out_memory))
    tensors = (query, in_memory, out_memory, memory_mask, memory_bias)
    call = describe_call(*tensors, options, shared=shared)
    weights_out = query.new_empty((*lead, call.hops, call.rows) if options.weights else 0)
    weights = weights_out if options.weights else None
    return *run_forward(query, call, options, weights, hop_proj), weights_out


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
    call = describe_call(*tensors, options, shared=shared)
    if options.weights and grad_weights is not None:
        grad_weights = grad_weights if query.ndim == 3 else grad_weights.unsqueeze(1)
        call = call._replace(grad_weights=operand(grad_weights))
    needs_scores = memory_bias is not None and bool(options.needed & 16)
    grad_query, memories, grad_sums, grad_scores = run_backward(
        grad_out, query, in_memory, out_memory, call, trace, stats, options, needs_scores, hop_proj
    )
    grad_proj = grad_bias = None
    if hop_proj is not None and options.needed & 8:
        states = trace[..., : 2 * call.hops : 2, :]
        equation = "rki,rkj->kij" if hop_proj.ndim == 3 else "rki,rkj->ij"
        factors = (x.reshape(-1, call.hops, query.shape[-1]) for x in (grad_sums, states))
        grad_proj = torch.einsum(equation, *factors).to(hop_proj.dtype)
    if grad_scores is not None and memory_bias is not None:
        grad_bias = summed_to(memory_bias, grad_scores)
    return grad_query, *memories, grad_proj, grad_bias


def describe_call(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    options: MemoryHopOptions,
    *,
    shared: bool,
) -> Hops:
    """Describe a call to the kernels; ``shared`` if the whole batch reads the same memory."""
    batch, queries = query.shape[0], query.shape[1] if query.ndim == 3 else 1
    input_memory = in_memory
    if out_memory is None:  # the next memory of a stack, or the only one
        out_memory = in_memory if in_memory.ndim == 3 else in_memory[:, 1:]
    return Hops(
        m=_memory_operand(input_memory),
        c=_memory_operand(out_memory),
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
    call: Hops,
    options: MemoryHopOptions,
    weights_out: Tensor | None = None,
    hop_proj: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, trace, stats)`` of the primitive, and write weights to ``weights_out``."""
    *lead, width = query.shape
    out = query.new_empty((*lead, width))
    trace = query.new_empty((*lead, 2 * call.hops + 1, width), dtype=torch.float32)
    stats = query.new_empty((*lead, call.hops, 2), dtype=torch.float32)
    launch_plan = plan("hops", query, block_of(width))
    initial_state: Operand | None = _vector_operand(query)  # later launches read the trace
    for first_hop, last_hop in _hops_of_launches(call, hop_proj):
        projected = None
        if hop_proj is not None:
            state = query.float() if first_hop == 0 else trace[..., 2 * first_hop, :]
            projected = (state @ _projection_of_hop(hop_proj, first_hop).mT).contiguous()
        launch(
            hops_forward,
            launch_plan,
            launch_plan.q_tiles(call.group) * _group_count(query, call),
            query.device,
            query=initial_state,
            call=call,
            p_trace=trace,
            p_stats=stats,
            weights=None if weights_out is None else Operand(weights_out, 0, 0, 0, 0),  # contiguous
            p_out=out,
            p_projected=projected,
            first_hop=first_hop,
            last_hop=last_hop,
            ACTIVATION=options.activation,
            NORMALIZE=options.normalize == "softmax",
            **_width_arguments(width),
        )
        initial_state = None
    return out, trace, stats


def run_backward(
    grad_out: Tensor | None,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    call: Hops,
    trace: Tensor,
    stats: Tensor,
    options: MemoryHopBackwardOptions,
    needs_scores: bool,
    hop_proj: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor, Tensor | None]:
    """Return the gradients of query, of (in_memory, out_memory), and of H_k u_k + o_k of each hop.

    If ``needs_scores``, the last result is the gradient of the scores.
    """
    *lead, width = query.shape
    batch, queries = lead[0], lead[1] if len(lead) == 2 else 1
    groups = _group_count(query, call)

    def empty_float32(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    grad_query = query.new_empty((*lead, width))
    grad_sums = empty_float32(batch, queries, call.hops, width)
    delta = empty_float32(batch, queries, call.hops)
    grad_scores = empty_float32(batch, queries, call.hops, call.rows) if needs_scores else None
    launch_plan = plan("hops_backward", query, block_of(width))
    kernel_arguments: dict[str, Any] = {
        "call": call,
        "p_trace": trace.contiguous(),
        "p_stats": stats.contiguous(),
        "p_grads": grad_sums,
        "p_delta": delta,
        "NORMALIZE": options.normalize == "softmax",
        **_width_arguments(width),
    }
    grad_next = grad_out
    for first_hop, last_hop in reversed(_hops_of_launches(call, hop_proj)):
        grad_state = grad_query if hop_proj is None else empty_float32(*lead, width)
        launch(
            hops_backward_query,
            launch_plan,
            launch_plan.q_tiles(call.group) * groups,
            query.device,
            **kernel_arguments,
            grad_out=None if grad_next is None else _vector_operand(grad_next),
            p_grad_scores=grad_scores,
            p_grad_query=grad_state,
            first_hop=first_hop,
            last_hop=last_hop,
            PROJECTED=hop_proj is not None,
            ACTIVATION=options.activation,
        )
        if hop_proj is not None:
            grad_sum = grad_sums[:, :, first_hop].reshape(*lead, width)
            grad_next = grad_state + grad_sum @ _projection_of_hop(hop_proj, first_hop)
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
            launch_plan,
            launch_plan.k_tiles(call.rows) * slots * memory.shape[0],
            query.device,
            **kernel_arguments,
            p_grad_memory=grad_memory,
            groups=groups,
            slots=slots,
            first_out_slot=1 if out_memory is None else 0,
            IS_INPUT=n == 0,
            IS_OUTPUT=n == 1 or out_memory is None,
            SUMMED=memory.shape[0] == 1 and groups != 1,
        )
    return grad_query, (memories[0], memories[1]), grad_sums, grad_scores


def _is_shared(memory: Tensor) -> bool:
    """Whether the whole batch shares one memory."""
    return memory.shape[0] == 1 or memory.stride(0) == 0


def _hops_of_launches(call: Hops, hop_proj: Tensor | None) -> list[tuple[int, int]]:
    """The first and last hop of each launch. PyTorch projects the state between two launches."""
    return [(0, call.hops - 1)] if hop_proj is None else [(n, n) for n in range(call.hops)]


def _group_count(query: Tensor, call: Hops) -> int:
    """The number of groups of queries; a group shares a memory."""
    rows = query.shape[0] * (query.shape[1] if query.ndim == 3 else 1)
    return rows // max(call.group, 1) if rows else 0


def _projection_of_hop(hop_proj: Tensor, hop: int) -> Tensor:
    """H_k of this hop, [D, D], in float32."""
    return (hop_proj if hop_proj.ndim == 2 else hop_proj[hop]).float()


def _width_arguments(width: int) -> dict[str, Any]:
    """The width of a row, and the precision, as arguments of a kernel."""
    return {"D": width, "BD": block_of(width), "PRECISION": precision()}


def _memory_operand(x: Tensor) -> Operand:
    """A memory [B|1, N, D] or [B|1, K, N, D] as [B, K, N, D]; without K all hops share it."""
    return operand(x if x.ndim == 4 else x.unsqueeze(1))


def _vector_operand(x: Tensor) -> Operand:
    """Vectors [B, D] or [B, Q, D] as an operand [B, Q, -, D]."""
    return operand(x[:, None, None] if x.ndim == 2 else x.unsqueeze(2))
