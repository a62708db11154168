"""The adapter of attention over packed sequences of different lengths."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import (
    address,
    broadcast_operand,
    packed_operand,
    with_columns_together,
)
from fastattn.backends._precision import allows_bf16_parts
from fastattn.backends.cpu.operands import DTYPES, accumulator, optional_operands
from fastattn.backends.primitives import VarlenOptions


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
    rows, heads, _ = query.shape
    out = empty_output(query, value.shape[2])
    lse = torch.empty((heads, rows), dtype=torch.float64, device="cpu")
    starts = _contiguous(cu_seqlens_q), _contiguous(cu_seqlens_k)
    if relative_bias is not None:
        relative_bias = with_columns_together(relative_bias)
    biases = (alibi_slopes, seed, sinks, relative_bias, None, mask_program)
    operands = optional_operands(len(starts[0]) - 1, heads, None, *biases)
    _run(query, key, value, out, lse, starts, operands, options, None)
    end = int(starts[0][-1])
    if end < rows:  # rows after the last sequence
        out[end:] = 0
        lse[:, end:] = -torch.inf
    return out, lse


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
        grad_out = query.new_zeros(1).expand(*query.shape[:2], value.shape[2])
    if out.stride(-1) != 1:
        out = out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    starts = _contiguous(cu_seqlens_q), _contiguous(cu_seqlens_k)
    widths = (query, query.shape[2]), (key, key.shape[2]), (value, value.shape[2])
    grads = [empty_output(x, width) for x, width in widths]
    batch, heads = len(starts[0]) - 1, query.shape[1]
    # The kernel skips sequences without queries or without keys, and rows after the last sequence:
    # their gradients are 0. Without heads it skips all.
    if heads == 0 or _has_gaps(*starts, query.shape[0], key.shape[0]):
        for grad in grads:
            grad.zero_()
    dtype = accumulator(query.dtype)
    grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=dtype, device="cpu")
    parts = bias_starts = grad_table = None
    if relative_bias is not None:
        relative_bias = with_columns_together(relative_bias)
        # A sequence has the distances below its own length: the sums take O(Tq + Tk) memory.
        sides = torch.maximum(starts[0].diff(), starts[1].diff()).clamp(min=1)
        sizes = heads * (2 * sides - 1)
        bias_starts = sizes.cumsum(0) - sizes
        parts = torch.zeros(int(sizes.sum()), dtype=relative_bias.dtype, device="cpu")
    biases = (alibi_slopes, seed, sinks, relative_bias, None, mask_program)
    _run(
        query,
        key,
        value,
        out,
        lse,
        starts,
        optional_operands(batch, heads, None, *biases),
        options,
        {
            "grad_out": packed_operand(grad_out),
            "grad_lse": 0 if grad_lse is None else grad_lse.data_ptr(),
            "grad_weights": None,
            "grad_query": packed_operand(grads[0]),
            "grad_key": packed_operand(grads[1]),
            "grad_value": packed_operand(grads[2]),
            "grad_sinks": None if grad_sinks is None else broadcast_operand(grad_sinks),
            "grad_relative_bias": address(parts),
            "bias_starts": address(bias_starts),
        },
    )
    if sinks is not None and grad_sinks is not None:
        if grad_lse is not None:
            grad_sinks += _of_sequences_without_keys(sinks, grad_lse, starts)
        grad_sinks = grad_sinks.to(sinks.dtype)
    if relative_bias is not None and parts is not None:
        grad_table = _sum_of_tables(parts, sides.tolist(), relative_bias)
    return *grads, grad_sinks, grad_table


def _sum_of_tables(parts: Tensor, sides: list[int], table: Tensor) -> Tensor:
    """The gradient of a table [1, Hq, 2 M + 1] from those of its sequences, [Hq, 2 side - 1]."""
    heads, size = table.shape[1:]
    grad = torch.zeros((heads, size), dtype=torch.float64, device="cpu")
    for side, part in zip(sides, parts.split([heads * (2 * n - 1) for n in sides]), strict=True):
        grad[:, size // 2 - side + 1 : size // 2 + side] += part.view(heads, 2 * side - 1)
    return grad.to(table.dtype)[None]


def _of_sequences_without_keys(
    sinks: Tensor, grad_lse: Tensor, starts: tuple[Tensor, Tensor]
) -> Tensor:
    """What sequences without keys add to the gradient of sinks [1, Hq]: their lse is the sink."""
    q_starts, k_starts = starts
    empty = (k_starts.diff() == 0).nonzero().flatten().tolist()
    rows = [grad_lse[:, q_starts[b] : q_starts[b + 1]].sum(1) for b in empty]
    of_heads = sum(rows, torch.zeros(sinks.shape[1], dtype=torch.float64, device="cpu"))
    return torch.where(sinks == -math.inf, 0.0, of_heads)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: tuple[Tensor, Tensor],
    operands: dict[str, Any],
    options: VarlenOptions,
    gradients: dict[str, Any] | None,
) -> None:
    batch = len(starts[0]) - 1
    (rows, heads, width), (keys, kv_heads, value_width) = query.shape, value.shape
    _cpu.varlen_attention(
        DTYPES[query.dtype],
        allows_bf16_parts,
        torch.get_num_threads(),
        (batch, heads, kv_heads, rows, keys, width, value_width),
        *packed_operand(query),
        *packed_operand(key),
        *packed_operand(value),
        *packed_operand(out),
        lse.data_ptr(),
        options,
        operands,
        starts[0].data_ptr(),
        starts[1].data_ptr(),
        gradients,
    )


def _contiguous(x: Tensor) -> Tensor:
    return x.to(torch.int64).contiguous()


def _has_gaps(q_starts: Tensor, k_starts: Tensor, rows: int, keys: int) -> bool:
    ends = int(q_starts[-1]) < rows or int(k_starts[-1]) < keys
    return ends or bool(((q_starts.diff() == 0) | (k_starts.diff() == 0)).any())
