"""The memory hops on the CUDA kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import summed_to
from fastattn.backends.cuda.operands import MAX_LENGTH, launch, why_not_dtype
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
    tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
    results: Any = launch(_cuda.memory_hops, query, options, *tensors)
    return results


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
    tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
    gradients = (grad_out, grad_weights)
    *grads, of_scores = launch(
        _cuda.memory_hops_backward, query, options, *gradients, *tensors, trace, stats
    )
    grad_bias = None
    if options.needed & 16 and memory_bias is not None:
        grad_bias = summed_to(memory_bias, of_scores[0, :, :, : options.hops])
    return grads[0], grads[1], grads[2], grads[3], grad_bias
