"""Scaled dot-product attention on the CUDA kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._partial import partial_gradients
from fastattn.backends.cuda.operands import (
    INFO,
    MAX_LENGTH,
    launch,
    why_not_dtype,
    why_not_mask,
)
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_backward", "why_not"]

_MAX_WIDTH: int = INFO["widths"][-1]


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    reasons = why_not_dtype(query.dtype) + why_not_mask(attn_mask)
    width = max(query.shape[-1], value.shape[-1])
    if width > _MAX_WIDTH:
        reasons.append(f"a head has {width} columns; the kernels take up to {_MAX_WIDTH}")
    if max(*query.shape[:3], key.shape[2]) > MAX_LENGTH:
        reasons.append(f"a size is greater than {MAX_LENGTH}")
    if relative_bias is not None and relative_bias.shape[2] // 2 > MAX_LENGTH:
        reasons.append(f"a distance of relative_bias is greater than {MAX_LENGTH}")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        reasons.append("alibi_slopes requires a gradient, which the kernel does not compute")
    return reasons


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,  # [B|1, Hq]
    relative_bias: Tensor | None = None,  # [B|1, Hq, 2 M + 1]
    positions: Tensor | None = None,  # [Lk] int32
    mask_program: Tensor | None = None,  # [size] int32
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``(out, lse, weights or None)``, see ``docs/design.md``."""
    biases = (attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    results: Any = launch(_cuda.attention, query, options, query, key, value, *biases)
    return results


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None,  # [B, Hq, Lq]
    grad_weights: Tensor | None,  # as weights
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, mask, sinks and relative bias, or None."""
    biases = (attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    if options.partial:
        forward, backward = scaled_dot_product_attention, scaled_dot_product_attention_backward
        given, tensors = (grad_out, grad_lse, grad_weights), (query, key, value, *biases)
        return partial_gradients(forward, backward, given, tensors, out, lse, options)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, grad_mask, stats, tables = launch(
        _cuda.attention_backward,
        query,
        options,
        grad_out,
        grad_lse,
        grad_weights,
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        seed,
        out,
        lse,
        sinks,
        relative_bias,
        positions,
        mask_program,
    )
    if grad_mask is not None and attn_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    grad_sinks = None if sinks is None else grad_of_sinks(sinks, lse, stats)
    grad_table = None
    if relative_bias is not None and tables is not None:
        grad_table = tables.sum(0, dtype=torch.float64).sum_to_size(relative_bias.shape).float()
    return *grads, grad_mask, grad_sinks, grad_table


def grad_of_sinks(sinks: Tensor, lse: Tensor, stats: Tensor) -> Tensor:
    """Return the gradient of sinks [B|1, Hq] from lse [B, Hq, Lq] and stats [B, Hq, Lq, 4].

    The sum of e^(sink - lse) (dlse - delta) over the rows; ``stats`` are those after the backward.
    """
    sink = sinks.to(torch.float64)[..., None]
    high, low, delta, rest = stats.to(torch.float64).unbind(-1)
    # Rows that see no key have high = inf and, without the rows after the last sequence, the
    # weight 1. A sink of -inf is none, and its rows have the weight 0 whatever is in them.
    weight = torch.where(high == math.inf, (lse == sink).double(), (sink - high - low).exp())
    shares = torch.where(sink == -math.inf, 0.0, -weight * (delta + rest))
    return shares.sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
