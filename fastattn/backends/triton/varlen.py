"""Attention over packed sequences on Triton: the kernels of attention, with sequence starts."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import VarlenOptions
from fastattn.backends.triton._attend import (
    Attention,
    Biases,
    Cotangents,
    attend,
    differentiate,
    kernel_options,
    positive_scale,
)
from fastattn.backends.triton._core import Options


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
    mask_program: Tensor | None = None,  # [size] int32
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    query, scale, _ = positive_scale(query, options)
    biases = Biases(None, alibi_slopes, seed, sinks, relative_bias, mask_program=mask_program)
    opt = _options(query, key, cu_seqlens_q, cu_seqlens_k, biases, options, scale)
    return attend(Attention(query, key, value, opt, cu_seqlens_q.shape[0] - 1))


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
    query, scale, sign = positive_scale(query, options)
    biases = Biases(None, alibi_slopes, seed, sinks, relative_bias, mask_program=mask_program)
    opt = _options(query, key, cu_seqlens_q, cu_seqlens_k, biases, options, scale)
    call = Attention(query, key, value, opt, cu_seqlens_q.shape[0] - 1)
    cotangents = Cotangents(grad_out, grad_lse)
    return differentiate(call, out, lse, cotangents, sign, biases)[0]


def _options(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    biases: Biases,
    options: VarlenOptions,
    scale: float,
) -> Options:
    """The options in the form of the kernels, for packed sequences."""
    (rows, heads), (keys, kv_heads) = query.shape[:2], key.shape[:2]
    sizes = (heads, kv_heads, rows, keys)
    offset = None if options.bottom_right else 0
    return kernel_options(sizes, biases, options, scale, offset, options.dropout_p)._replace(
        p_q_starts=cu_seqlens_q.to(torch.int64).contiguous(),
        p_k_starts=cu_seqlens_k.to(torch.int64).contiguous(),
        batch=cu_seqlens_q.shape[0] - 1,
    )
