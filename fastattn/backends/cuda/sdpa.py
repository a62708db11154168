"""Scaled dot-product attention on the CUDA kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import (
    address,
    broadcast_operand,
    operand,
    table_for,
)
from fastattn.backends._partial import partial_gradients
from fastattn.backends._precision import allows_tf32
from fastattn.backends.cuda.operands import (
    DTYPES,
    INFO,
    MASK_DTYPES,
    MAX_LENGTH,
    mask_workspace,
    on,
    optional_operands,
    why_not_dtype,
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
    reasons = why_not_dtype(query.dtype)
    if attn_mask is not None and attn_mask.dtype not in MASK_DTYPES:
        dtype = attn_mask.dtype
        reasons.append(f"the mask's dtype {dtype} is not bool, float32, bfloat16 or float16")
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    batch, heads, queries, _ = query.shape
    out = empty_output(query, value.shape[-1])
    lse = query.new_empty((batch, heads, queries), dtype=torch.float64)
    applied, weights = query.new_empty(0), None
    if options.weights != 0:
        # [B, Hq, Lq, Lk], or their mean over the heads as [B, 1, Lq, Lk]
        applied = query.new_empty(
            (batch, heads if options.weights == 1 else 1, queries, key.shape[2])
        )
        stats = _row_stats(query)
        weights = {"applied": broadcast_operand(applied), "row_stats": stats.data_ptr()}
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
    workspace = mask_workspace(mask_program, (*query.shape[:3], key.shape[2]))
    optional = (attn_mask, alibi_slopes, sinks, relative_bias, positions, mask_program, workspace)
    with on(query) as stream:
        _cuda.attention_forward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, key, value),
            options,
            _operands(query, key, value, out, lse, seed, optional),
            weights,
        )
    return out, lse, applied[:, 0] if options.weights == 2 else applied


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
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    # The gradients of a batch of calls share it, with stride 0; the kernels read it in order.
    lse = lse.contiguous()
    if grad_weights is not None and options.weights == 2:
        grad_weights = grad_weights.unsqueeze(1).expand(*query.shape[:3], key.shape[2])
    grad_query = empty_output(query, query.shape[-1])
    grad_key = empty_output(key, key.shape[-1])
    grad_value = empty_output(value, value.shape[-1])
    grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_mask = query.new_empty(attn_mask.shape, dtype=torch.float32)
    tables = None
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
        tables = relative_bias.new_zeros((2, *query.shape[:2], relative_bias.shape[2]))
    workspace = mask_workspace(mask_program, (*query.shape[:3], key.shape[2]))
    optional = (attn_mask, alibi_slopes, sinks, relative_bias, positions, mask_program, workspace)
    stats = _row_stats(query)
    with on(query) as stream:
        _cuda.attention_backward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, key, value),
            options,
            _operands(query, key, value, out, lse, seed, optional),
            {
                "grad_out": operand(grad_out),
                "grad_lse": address(grad_lse),
                "grad_weights": None if grad_weights is None else operand(grad_weights),
                "grad_query": operand(grad_query),
                "grad_key": operand(grad_key),
                "grad_value": operand(grad_value),
                "grad_mask": None if grad_mask is None else broadcast_operand(grad_mask),
                "grad_relative_bias": address(tables),
                "row_stats": stats.data_ptr(),
            },
        )
    if grad_mask is not None and attn_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    grad_sinks = None if sinks is None else grad_of_sinks(sinks, lse, stats)
    grad_table = None
    if relative_bias is not None and tables is not None:
        grad_table = tables.sum(0, dtype=torch.float64).sum_to_size(relative_bias.shape).float()
    return grad_query, grad_key, grad_value, grad_mask, grad_sinks, grad_table


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


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], *value.shape[2:]
    return batch, heads, kv_heads, queries, keys, width, value_width


def _row_stats(query: Tensor) -> Tensor:
    """The statistics of each row that kernels exchange; see RowStats in csrc/cuda/kernels."""
    return query.new_empty((*query.shape[:3], 4), dtype=torch.float32)


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    optional: tuple[Tensor | None, ...],  # as optional_operands takes them
) -> dict[str, Any]:
    return {
        "query": operand(query),
        "key": operand(key),
        "value": operand(value),
        "out": operand(out),
        "lse": lse.data_ptr(),
        **optional_operands((*query.shape[:3], key.shape[2]), *optional),
        "seed": address(seed),
        "tf32": allows_tf32(),
        "q_starts": 0,
        "k_starts": 0,
    }
