"""The adapters of memory hops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cpu
from fastattn.backends._alloc import summed_to
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
    only_first: bool = False,
    keeps: bool = False,
) -> Any:
    """Return ``(out, trace, stats, weights)``, see ``docs/design.md``; or out alone, or one more.

    With ``keeps``, that is ``kept`` of the backward pass.
    """
    memories, others = (in_memory, out_memory), (hop_proj, memory_mask, memory_bias)
    results = _cpu.memory_hops(options, query, *memories, *others, not only_first, keeps)
    return results[0] if only_first else results if keeps else results[:-1]


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
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of query, memories, hop_proj and bias, see ``docs/design.md``."""
    grad_query, grad_in, grad_out_memory, grad_proj, scores = _cpu.memory_hops_backward(
        options,
        grad_out,
        grad_weights,
        query,
        in_memory,
        out_memory,
        hop_proj,
        memory_mask,
        memory_bias,
        trace,
        stats,
        kept,
    )
    grad_bias = None
    if scores is not None and memory_bias is not None:
        grad_bias = summed_to(memory_bias, scores)
    if out_memory is not None and in_memory.size(0) != out_memory.size(0):
        # All share one of the two memories.
        grad_in, grad_out_memory = (
            grad if grad is None or grad.shape[0] == memory.shape[0] else grad.sum(0, keepdim=True)
            for grad, memory in ((grad_in, in_memory), (grad_out_memory, out_memory))
        )
    return grad_query, grad_in, grad_out_memory, grad_proj, grad_bias
