"""Attention over packed sequences, on the CUDA kernels of attention.

The starts of the sequences stay on the GPU, so the host never waits for them. Invalid ones raise
no error, but the kernels never access rows outside the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import launch
from fastattn.backends.primitives import VarlenOptions

__all__ = ["varlen_attention", "varlen_attention_backward", "why_not"]


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    # Not [None], which fails for `explain` if PyTorch was built without this kind of device.
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return sdpa.why_not(query, key, value, alibi_slopes=alibi_slopes, relative_bias=relative_bias)


def varlen_attention(
    query: Tensor,  # [Tq, Hq, D]
    key: Tensor,  # [Tk, Hkv, D]
    value: Tensor,  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1] int64
    cu_seqlens_k: Tensor,  # [B + 1] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,
    sinks: Tensor | None = None,  # [1, Hq]
    relative_bias: Tensor | None = None,  # [1, Hq, 2 M + 1]
    mask_program: Tensor | None = None,  # [size] int32, of packed sequences
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    starts = (cu_seqlens_q, cu_seqlens_k)
    biases = (alibi_slopes, seed, sinks, relative_bias, mask_program)
    results: Any = launch(
        _cuda.varlen_attention, query, options, query, key, value, *starts, *biases
    )
    return results


def varlen_attention_backward(
    grad_out: Tensor | None,  # [Tq, Hq, Dv]
    grad_lse: Tensor | None,  # [Hq, Tq]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: VarlenOptions,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, sinks and relative bias, or None."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, stats, grad_table = launch(
        _cuda.varlen_attention_backward,
        query,
        options,
        grad_out,
        grad_lse,
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        seed,
        out,
        lse,
        sinks,
        relative_bias,
        mask_program,
    )
    grad_sinks = None if sinks is None else sdpa.grad_of_sinks(sinks, lse[None], stats[None])
    return *grads, grad_sinks, grad_table
