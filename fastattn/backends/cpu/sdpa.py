"""The adapters of attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import (
    address,
    broadcast_operand,
    operand,
    program_operands,
    table_for,
)
from fastattn.backends._precision import allows_bf16_parts
from fastattn.backends.cpu.operands import DTYPES, accumulator, optional_operands
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions

_OF_SINKS = 8  # their place in `wants`, after the eight arguments that all fast paths have


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
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    out = empty_output(query, value_width)
    lse = torch.empty((batch, heads, queries), dtype=torch.float64, device="cpu")
    if options.weights == 1:
        applied = query.new_empty((batch, heads, queries, keys))
    elif options.weights == 2:
        applied = query.new_empty((batch, queries, keys))
    else:
        applied = query.new_empty(0)
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
    biases = (attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    _cpu.attention_forward(
        DTYPES[query.dtype],
        allows_bf16_parts,
        torch.get_num_threads(),
        (batch, heads, key.shape[1], queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        options,
        _operands(query, biases, applied if options.weights else None),
    )
    return out, lse, applied


@functools.lru_cache(maxsize=64)
def _causal_options(scale: float) -> AttentionOptions:
    return AttentionOptions(scale=scale, window_right=0)


def _plain_operands(
    mask: Tensor | None, sinks: Tensor | None, program: Tensor | None
) -> dict[str, Any] | int | None:
    """The operands by name, or the address of sinks alone, which is 0.7 us faster."""
    if mask is None and program is None and (sinks is None or sinks.is_contiguous()):
        return None if sinks is None else sinks.data_ptr()
    operands = {} if program is None else program_operands(program)
    if mask is not None:
        operands["mask"], operands["mask_dtype"] = operand(mask), DTYPES[mask.dtype]
    if sinks is not None:
        operands["sinks"], operands["sinks_stride"] = sinks.data_ptr(), (0, *sinks.stride())
    return operands


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # expanded to [B, Hq, Lq, Lk]
    scale: float,
    causal: bool,
    needs_lse: bool,
    sinks: Tensor | None = None,  # [Hq]
    program: Tensor | None = None,  # of a mask
) -> tuple[Tensor, Tensor | None]:
    """Return ``(out, lse)`` of a call without other options, with the least Python.

    At 16 rows of 64 in 8 heads this saves 4 of 17 us, and leaving out lse, 2.
    """
    if mask is None and sinks is None and program is None:
        threads = torch.get_num_threads()
        results = _cpu.plain_attention(
            query, key, value, scale, causal, needs_lse, threads, allows_bf16_parts
        )
        if results is not None:
            return results
    batch, heads, queries, width = query.shape
    _, kv_heads, keys, value_width = value.shape
    out = empty_output(query, value_width)
    lse = (
        torch.empty((batch, heads, queries), dtype=torch.float64, device="cpu")
        if needs_lse
        else None
    )
    _cpu.attention_forward(
        DTYPES[query.dtype],
        allows_bf16_parts,
        torch.get_num_threads(),
        (batch, heads, kv_heads, queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        0 if lse is None else lse.data_ptr(),
        _causal_options(scale) if causal else scale,
        _plain_operands(mask, sinks, program),
    )
    return out, lse


def plain_attention_call(query: Any, key: Any, value: Any, grouped: bool) -> int:
    """Return a number that is the same for calls of one dtype and width, or 0: general path.

    It is odd if a tensor requires a gradient. If it is not 0, the tensors are exact ones of the CPU
    with an address, [B, H, L, D] of one dtype, no dimension is empty, and their sizes agree.
    """
    return _cpu.plain_attention_call(query, key, value, grouped)


def plain_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    wants: Sequence[bool] | None = None,  # of fast_path; all but that of sinks are computed anyway
    sinks: Tensor | None = None,
    program: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of :func:`plain_attention`, that of sinks if wanted; none is empty."""
    if mask is None and sinks is None and program is None:
        threads = torch.get_num_threads()
        grads = _cpu.plain_attention_backward(
            grad_out, query, key, value, out, lse, scale, causal, threads, allows_bf16_parts
        )
        if grads is not None:
            return grads
    batch, heads, queries, width = query.shape
    _, kv_heads, keys, value_width = value.shape
    grad_query = empty_output(query, width)
    grad_key = empty_output(key, width)
    grad_value = empty_output(value, value_width)
    grad_sinks = None
    gradients: dict[str, Any] | tuple[int | tuple[int, ...], ...]
    if sinks is not None and (wants is None or wants[_OF_SINKS]):
        grad_sinks = torch.empty_like(sinks)  # contiguous, as is every new vector
        gradients = {
            "grad_out": operand(grad_out),
            "grad_lse": 0,
            "grad_weights": None,
            "grad_query": operand(grad_query),
            "grad_key": operand(grad_key),
            "grad_value": operand(grad_value),
            "grad_mask": None,
            "grad_sinks": (grad_sinks.data_ptr(), (0, 1)),
        }
    else:
        gradients = (
            grad_out.data_ptr(),
            grad_out.stride(),
            grad_query.data_ptr(),
            grad_query.stride(),
            grad_key.data_ptr(),
            grad_key.stride(),
            grad_value.data_ptr(),
            grad_value.stride(),
        )
    _cpu.attention_backward(
        DTYPES[query.dtype],
        allows_bf16_parts,
        torch.get_num_threads(),
        (batch, heads, kv_heads, queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        _causal_options(scale) if causal else scale,
        _plain_operands(mask, sinks, program),
        gradients,
    )
    if grad_sinks is None:
        return grad_query, grad_key, grad_value
    return grad_query, grad_key, grad_value, grad_sinks


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
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, heads, queries, value_width)
    if out.stride(-1) != 1:
        out = out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    # The gradients of a batch of calls share it, with stride 0; the kernels read it in order.
    lse = lse.contiguous()
    empty = min(heads, queries, keys) == 0  # the kernel writes nothing then
    grad_query = empty_output(query, width)
    grad_key = empty_output(key, width)
    grad_value = empty_output(value, value_width)
    if empty:
        for grad in (grad_query, grad_key, grad_value):
            grad.zero_()
    grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        summed = 1 in attn_mask.shape[2:]  # one element may sum thousands of terms
        wide = torch.float64 if summed else accumulator(query.dtype)
        grad_mask = torch.zeros(attn_mask.shape, dtype=wide, device="cpu")
    grad_sinks = None
    if sinks is not None:
        grad_sinks = torch.zeros(sinks.shape, dtype=accumulator(query.dtype), device="cpu")
    grad_table = None
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
        new = torch.zeros if empty else torch.empty
        table = batch, heads, relative_bias.shape[2]
        grad_table = new(table, dtype=relative_bias.dtype, device="cpu")
    biases = (attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    _cpu.attention_backward(
        DTYPES[query.dtype],
        allows_bf16_parts,
        torch.get_num_threads(),
        (batch, heads, key.shape[1], queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        options,
        _operands(query, biases, None),
        {
            "grad_out": operand(grad_out),
            "grad_lse": 0 if grad_lse is None else grad_lse.data_ptr(),
            "grad_weights": None if grad_weights is None else _weights_operand(grad_weights),
            "grad_query": operand(grad_query),
            "grad_key": operand(grad_key),
            "grad_value": operand(grad_value),
            "grad_mask": None if grad_mask is None else broadcast_operand(grad_mask),
            "partial": options.partial,
            "grad_sinks": None if grad_sinks is None else broadcast_operand(grad_sinks),
            "grad_relative_bias": address(grad_table),
        },
    )
    if grad_mask is not None and attn_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    if sinks is not None and grad_sinks is not None:
        if keys == 0 and grad_lse is not None:  # lse is the sink
            of_rows = torch.where(sinks == -math.inf, 0.0, grad_lse.sum(2))
            grad_sinks += of_rows.sum_to_size(sinks.shape)
        grad_sinks = grad_sinks.to(sinks.dtype)
    if relative_bias is not None and grad_table is not None and relative_bias.shape[0] != batch:
        grad_table = grad_table.sum(0, True, dtype=torch.float64).to(relative_bias.dtype)
    return grad_query, grad_key, grad_value, grad_mask, grad_sinks, grad_table


def _operands(
    query: Tensor,
    biases: tuple[Tensor | None, ...],  # as optional_operands takes them
    applied: Tensor | None,
) -> dict[str, Any] | None:
    """The optional operands of a call, None if it has none of them."""
    if applied is None and all([x is None for x in biases]):  # noqa: C419  (faster)
        return None
    batch, heads = query.shape[:2]
    operands = optional_operands(batch, heads, *biases)
    if applied is not None:
        operands["applied"] = _weights_operand(applied)
    return operands


def _weights_operand(weights: Tensor) -> tuple[int, tuple[int, ...]]:
    """Averaged weights [B, Lq, Lk] have no head axis: its stride is 0."""
    strides = weights.stride()
    return weights.data_ptr(), strides if len(strides) == 4 else (strides[0], 0, *strides[1:])
