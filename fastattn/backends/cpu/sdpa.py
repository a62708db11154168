"""The adapters of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions


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
    only_first: bool = False,
) -> Any:
    """Return ``(out, lse, weights or None)``, or out alone; see ``docs/design.md``."""
    results: Any = _cpu.attention(
        options,
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        seed,
        sinks,
        relative_bias,
        positions,
        mask_program,
        not only_first,
    )
    return results[0] if only_first else results


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
    grad_query, grad_key, grad_value, grad_mask, grad_sinks, grad_table = _cpu.attention_backward(
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
    if grad_sinks is not None and sinks is not None and key.shape[2] == 0 and grad_lse is not None:
        # Without keys, lse is the sink.
        of_rows = torch.where(sinks == -math.inf, 0.0, grad_lse.sum(2))
        grad_sinks += of_rows.sum_to_size(sinks.shape)
    if relative_bias is not None and grad_table is not None and len(relative_bias) != len(query):
        grad_table = grad_table.sum(0, True, dtype=torch.float64).to(relative_bias.dtype)
    return grad_query, grad_key, grad_value, grad_mask, grad_sinks, grad_table
