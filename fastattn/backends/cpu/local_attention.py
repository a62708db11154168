"""The adapter of local attention: from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._operands import Operand, address, with_columns_together
from fastattn.backends.cpu.operands import DTYPES, accumulator
from fastattn.backends.primitives import LocalOptions


def local_attention(
    query: Tensor,  # [B, Lq, D]
    key: Tensor,  # [B, Lk, D]
    value: Tensor,  # [B, Lk, Dv]
    positions: Tensor,  # [B, Lq]
    padding: Tensor | None,  # [B, Lk] bool
    factor: Tensor | None,  # [B, Lq, W]
    *,
    options: LocalOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    wide = accumulator(query.dtype)
    query, key, value = (with_columns_together(x) for x in (query, key, value))
    positions, padding, factor = _flat(positions, wide), _flat(padding), _flat(factor, wide)
    batch, queries, width = query.shape
    keys, value_width = value.shape[1:]
    out = query.new_empty((batch, queries, value_width))
    weights = query.new_empty((batch, queries, options.rows(keys)), dtype=wide)
    _cpu.local_attention(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        options,
        _operands(query, key, value, positions, padding, factor, weights),
        out.data_ptr(),
    )
    return out, weights


def local_attention_backward(
    grad_out: Tensor | None,  # [B, Lq, Dv]
    grad_weights: Tensor | None,  # [B, Lq, W]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    factor: Tensor | None,
    weights: Tensor,
    *,
    options: LocalOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and positions, see ``docs/design.md``."""
    wide = accumulator(query.dtype)
    query, key, value = (with_columns_together(x) for x in (query, key, value))
    wide_positions, padding, factor = _flat(positions, wide), _flat(padding), _flat(factor, wide)
    weights, grad_weights = weights.contiguous(), _flat(grad_weights, wide)
    grad_out = None if grad_out is None else with_columns_together(grad_out)
    batch, queries, width = query.shape
    keys, value_width = value.shape[1:]
    grads = [x.new_empty(x.shape) for x in (query, key, value, wide_positions)]
    coefficients = weights.new_empty((2, *weights.shape))
    _cpu.local_attention_backward(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        options,
        _operands(query, key, value, wide_positions, padding, factor, weights),
        {
            "grad_out": None if grad_out is None else _rows(grad_out),
            "grad_weights": address(grad_weights),
            "grad_query": grads[0].data_ptr(),
            "grad_key": grads[1].data_ptr(),
            "grad_value": grads[2].data_ptr(),
            "grad_positions": grads[3].data_ptr(),
            "coefficients": coefficients.data_ptr(),
        },
    )
    return grads[0], grads[1], grads[2], grads[3].to(positions.dtype)


def plain_local_call(query: Any, key: Any, value: Any, positions: Any, padding: Any) -> int:
    """Return a number that is the same for calls of one dtype, or 0: take the general path.

    It is odd if a tensor requires a gradient. If it is not 0, all are plain tensors of the CPU that
    the kernel reads as they are, not empty, and their sizes agree; padding may be None.
    """
    return _cpu.plain_local_call(query, key, value, positions, padding)


def plain_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    options: LocalOptions,
    unused: None,
    differentiable: bool,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)`` of a call without a factor."""
    how = options.reach, options.bell, torch.get_num_threads()
    return _cpu.plain_local(query, key, value, positions, padding, *how)


def plain_local_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    weights: Tensor,
    options: LocalOptions,
    unused: None,
    wants: Sequence[bool],  # all are computed anyway
    positions: Tensor,
) -> tuple[Tensor, ...] | None:
    """Return the gradients of query, key, value and positions of :func:`plain_local`, or None: the
    general path has to compute them.
    """
    how = options.reach, options.bell, torch.get_num_threads()
    return _cpu.plain_local_backward(grad_out, query, key, value, positions, padding, weights, *how)


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    factor: Tensor | None,
    weights: Tensor,
) -> dict[str, Any]:
    return {
        "query": _rows(query),
        "key": _rows(key),
        "value": _rows(value),
        "positions": positions.data_ptr(),
        "padding": address(padding),
        "factor": address(factor),
        "weights": weights.data_ptr(),
    }


def _rows(x: Tensor) -> Operand:
    """[B, rows, columns] as an operand [B, rows, columns, -]; the columns are contiguous."""
    return x.data_ptr(), (x.stride(0), x.stride(1), 1, 0)


def _flat(x: Any, dtype: torch.dtype = torch.bool) -> Any:
    """A tensor of this dtype without gaps; None for None."""
    if x is None or (x.dtype is dtype and x.is_contiguous()):
        return x
    return x.to(dtype).contiguous()
