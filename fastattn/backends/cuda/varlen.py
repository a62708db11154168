"""Attention over packed sequences, on the CUDA kernels of attention.

The starts of the sequences stay on the GPU, so the host never waits for them. Invalid ones raise
no error, but the kernels never access rows outside the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import address, packed_operand, table_for
from fastattn.backends._precision import allows_tf32
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import DTYPES, mask_workspace, on, optional_operands
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
    rows, heads, _ = query.shape
    out = empty_output(query, value.shape[2])
    lse = query.new_empty((heads, rows), dtype=torch.float64)
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sizes = _sizes(query, key, value, cu_seqlens_q)
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
    workspace = _mask_workspace(sizes, mask_program)
    optional = (alibi_slopes, sinks, relative_bias, None, mask_program, workspace)
    with on(query) as stream:
        _cuda.attention_forward(
            DTYPES[query.dtype],
            stream,
            sizes,
            options,
            _operands(query, key, value, out, lse, starts, seed, optional),
            None,
        )
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
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    grads = tuple(empty_output(x, x.shape[2]) for x in (query, key, value))
    stats = query.new_empty((*lse.shape, 4), dtype=torch.float32)
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sizes = _sizes(query, key, value, cu_seqlens_q)
    parts = grad_table = None
    if relative_bias is not None:
        relative_bias = table_for(query, relative_bias)
        # A sequence has the distances below its own length, so the sums take O(Tq + Tk) memory.
        rows = query.shape[0] + key.shape[0]
        parts = query.new_zeros((2, query.shape[1], rows), dtype=torch.float32)
        grad_table = torch.zeros_like(relative_bias, memory_format=torch.contiguous_format)
    workspace = _mask_workspace(sizes, mask_program)
    optional = (alibi_slopes, sinks, relative_bias, None, mask_program, workspace)
    with on(query) as stream:
        _cuda.attention_backward(
            DTYPES[query.dtype],
            stream,
            sizes,
            options,
            _operands(query, key, value, out, lse, starts, seed, optional),
            {
                "grad_out": packed_operand(grad_out),
                "grad_lse": address(grad_lse),
                "grad_weights": None,
                "grad_query": packed_operand(grads[0]),
                "grad_key": packed_operand(grads[1]),
                "grad_value": packed_operand(grads[2]),
                "grad_mask": None,
                "grad_relative_bias": address(parts),
                "grad_table": address(grad_table),
                "row_stats": stats.data_ptr(),
            },
        )
    grad_sinks = None if sinks is None else sdpa.grad_of_sinks(sinks, lse[None], stats[None])
    return *grads, grad_sinks, grad_table


def _sizes(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> tuple[int, ...]:
    rows, heads, width = query.shape
    keys, kv_heads, value_width = value.shape
    return starts.shape[0] - 1, heads, kv_heads, rows, keys, width, value_width


def _mask_workspace(sizes: tuple[int, ...], mask_program: Tensor | None) -> Tensor | None:
    batch, heads, _, rows, keys, *_ = sizes
    return mask_workspace(mask_program, (batch, heads, rows, keys), packed=True)


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: tuple[Tensor, Tensor],
    seed: Tensor | None,
    optional: tuple[Tensor | None, ...],  # as optional_operands takes them, without a mask
) -> dict[str, Any]:
    return {
        "query": packed_operand(query),
        "key": packed_operand(key),
        "value": packed_operand(value),
        "out": packed_operand(out),
        "lse": lse.data_ptr(),
        **optional_operands((starts[0].shape[0] - 1, query.shape[1]), None, *optional),
        "seed": address(seed),
        "tf32": allows_tf32(),
        "q_starts": starts[0].data_ptr(),
        "k_starts": starts[1].data_ptr(),
    }
