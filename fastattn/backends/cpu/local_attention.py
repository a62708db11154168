"""The adapter of local attention: from tensors to addresses and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._operands import Operand, address, with_columns_together
from fastattn.backends.cpu.operands import DTYPES, accumulator
from fastattn.backends.primitives import NoOptions


def local_attention(
    query: Tensor,  # [B, Lq, D]
    key: Tensor,  # [B, Lk, D]
    value: Tensor,  # [B, Lk, Dv]
    first: Tensor,  # [B, Lq] int64
    seen: Tensor,  # [B, Lq, W] bool
    factor: Tensor | None,  # [B, Lq, W]
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    wide = accumulator(query.dtype)
    query, key, value = (with_columns_together(x) for x in (query, key, value))
    first, seen, factor = first.contiguous(), seen.contiguous(), _flat(factor, wide)
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    weights = query.new_empty(seen.shape, dtype=wide)
    _cpu.local_attention(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        _sizes(query, value, seen),
        _operands(query, key, value, first, seen, factor, weights),
        out.data_ptr(),
    )
    return out, weights


def local_attention_backward(
    grad_out: Tensor | None,  # [B, Lq, Dv]
    grad_weights: Tensor | None,  # [B, Lq, W]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Tensor,
    factor: Tensor | None,
    weights: Tensor,
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and factor, see ``docs/design.md``."""
    wide = accumulator(query.dtype)
    query, key, value = (with_columns_together(x) for x in (query, key, value))
    first, seen, wide_factor = first.contiguous(), seen.contiguous(), _flat(factor, wide)
    weights, grad_weights = weights.contiguous(), _flat(grad_weights, wide)
    grad_out = None if grad_out is None else with_columns_together(grad_out)
    grads = [x.new_empty(x.shape) for x in (query, key, value)]
    grad_factor = None if factor is None else query.new_empty(seen.shape, dtype=wide)
    coefficients = query.new_empty((2, *seen.shape), dtype=wide)
    _cpu.local_attention_backward(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        _sizes(query, value, seen),
        _operands(query, key, value, first, seen, wide_factor, weights),
        {
            "grad_out": None if grad_out is None else _rows(grad_out),
            "grad_weights": address(grad_weights),
            "grad_query": grads[0].data_ptr(),
            "grad_key": grads[1].data_ptr(),
            "grad_value": grads[2].data_ptr(),
            "grad_factor": address(grad_factor),
            "coefficients": coefficients.data_ptr(),
        },
    )
    if factor is not None and grad_factor is not None:
        grad_factor = grad_factor.to(factor.dtype)
    return grads[0], grads[1], grads[2], grad_factor


def _sizes(query: Tensor, value: Tensor, seen: Tensor) -> tuple[int, ...]:
    batch, queries, width = query.shape
    return batch, queries, value.shape[1], width, value.shape[2], seen.shape[2]


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Tensor,
    factor: Tensor | None,
    weights: Tensor,
) -> dict[str, Any]:
    return {
        "query": _rows(query),
        "key": _rows(key),
        "value": _rows(value),
        "first": first.data_ptr(),
        "seen": seen.data_ptr(),
        "factor": address(factor),
        "weights": weights.data_ptr(),
    }


def _rows(x: Tensor) -> Operand:
    """[B, rows, columns] as an operand [B, rows, columns, -]; the columns are contiguous."""
    return x.data_ptr(), (x.stride(0), x.stride(1), 1, 0)


def _flat(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()
