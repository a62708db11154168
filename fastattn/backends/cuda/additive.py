"""Additive attention on the CUDA kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import summed_to
from fastattn.backends._operands import address, operand
from fastattn.backends.cuda.operands import DTYPES, MASK_DTYPES, MAX_LENGTH, on, why_not_dtype
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions

__all__ = ["additive_attention", "additive_attention_backward", "why_not"]

_Operand = tuple[int, tuple[int, ...]]


def why_not(query: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    reasons = why_not_dtype(query.dtype)
    if attn_mask is not None and attn_mask.dtype not in MASK_DTYPES:
        dtype = attn_mask.dtype
        reasons.append(f"the mask's dtype {dtype} is not bool, float32, bfloat16 or float16")
    if max(*query.shape, *value.shape[1:]) > MAX_LENGTH:
        reasons.append(f"a size is greater than {MAX_LENGTH}")
    return reasons


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None,  # [A]
    attn_mask: Tensor | None,  # [B|1, Tq|1, Tk|1]
    seed: Tensor | None,
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    shape = (*query.shape[:2], key.shape[1])
    out = query.new_empty((*shape[:2], value.shape[2]))
    applied = query.new_empty(shape if options.weights else 0)
    scores = query.new_empty(shape, dtype=torch.float32)
    vector, wide_bias = _wide(v), None if bias is None else _wide(bias)
    with on(query) as stream:
        _cuda.additive_forward(
            DTYPES[query.dtype],
            stream,
            (*shape, query.shape[2], value.shape[2]),
            options,
            _operands(query, key, value, vector, wide_bias, attn_mask, seed),
            {
                "out": _headless(out),
                "applied": _headless(applied) if options.weights else None,
                "scores": scores.data_ptr(),
            },
        )
    return out, applied


def additive_attention_backward(
    grad_out: Tensor | None,  # [B, Tq, Dv]
    grad_weights: Tensor | None,  # [B, Tq, Tk]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    *,
    options: AdditiveBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, v, bias and the mask, see ``docs/design.md``."""
    batch, queries, width = query.shape
    keys, value_width = value.shape[1:]
    shape = (batch, queries, keys)
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, queries, value_width)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    scores, gradients = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    tiles = -(-queries // _cuda.additive_tile)
    parts = query.new_empty((batch, tiles, 2, width), dtype=torch.float32)
    vector, wide_bias = _wide(v), None if bias is None else _wide(bias)
    with on(query) as stream:
        _cuda.additive_backward(
            DTYPES[query.dtype],
            stream,
            (*shape, width, value_width),
            options,
            _operands(query, key, value, vector, wide_bias, attn_mask, seed),
            {
                "grad_out": _headless(grad_out),
                "grad_lse": 0,
                "grad_weights": None if grad_weights is None else _headless(grad_weights),
                "grad_query": _headless(grad_query),
                "grad_key": _headless(grad_key),
                "grad_value": _headless(grad_value),
                "scores": scores.data_ptr(),
                "gradients": gradients.data_ptr(),
                "parts": parts.data_ptr(),
            },
        )
    grad_v, grad_bias = parts.sum((0, 1), dtype=torch.float64)
    grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_mask = summed_to(attn_mask, gradients)
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_v.to(v.dtype),
        None if bias is None else grad_bias.to(bias.dtype),
        grad_mask,
    )


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
) -> dict[str, Any]:
    shape = (*query.shape[:2], key.shape[1])
    return {
        "query": _headless(query),
        "key": _headless(key),
        "value": _headless(value),
        "vector": vector.data_ptr(),
        "bias": address(bias),
        "mask": None if attn_mask is None else _headless(attn_mask.expand(shape)),
        "mask_dtype": 0 if attn_mask is None else MASK_DTYPES[attn_mask.dtype],
        "seed": address(seed),
    }


def _wide(x: Tensor) -> Tensor:
    """A small vector in the form that the kernels read."""
    return x.to(torch.float32).contiguous()


def _headless(x: Tensor) -> _Operand:
    """[B, L, D] as an operand with a head dimension."""
    return operand(x.unsqueeze(1))
