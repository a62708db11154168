"""The adapter of memory encoding: from tensors to addresses and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._operands import encoding_operands, with_columns_together
from fastattn.backends.cpu.operands import DTYPES, accumulator
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions


def encode_memory(
    tokens: Tensor,  # [R, B, N, J] int64
    weight: Tensor,  # [R, G, V, D]
    factors: Tensor,  # [J, D] float32, float64 for float64
    temporal: Tensor | None,  # [R, G, N, D]
    *,
    options: EncodeMemoryOptions,
) -> Tensor:
    """Return the memories [R, B, G, N, D], see ``docs/design.md``."""
    models, batch, slots, words = tokens.shape
    _, tables, rows, width = weight.shape
    out = weight.new_empty((models, batch, tables, slots, width))
    weight, factors = with_columns_together(weight), with_columns_together(factors)
    if temporal is not None:
        temporal = with_columns_together(temporal)
    _cpu.encode_memory(
        DTYPES[weight.dtype],
        torch.get_num_threads(),
        (models, tables, batch, slots, words, rows, width),
        options,
        encoding_operands(tokens, factors, weight, temporal),
        out.data_ptr(),
    )
    return out


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,
    factors: Tensor,
    *,
    options: EncodeMemoryBackwardOptions,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and temporal, see ``docs/design.md``."""
    models, batch, tables, slots, width = grad.shape
    grad, factors = with_columns_together(grad), with_columns_together(factors)
    rows, temporal = options.rows, options.temporal
    dtype = accumulator(grad.dtype)
    grad_weight = grad.new_empty((models, tables, rows, width), dtype=dtype)
    grad_temporal = grad.new_empty((models, tables, slots, width) if temporal else 0, dtype=dtype)
    _cpu.encode_memory_backward(
        DTYPES[grad.dtype],
        torch.get_num_threads(),
        (models, tables, batch, slots, tokens.shape[3], rows, width),
        options,
        {
            "tokens": tokens.data_ptr(),
            "token_stride": tokens.stride(),
            "factors": factors.data_ptr(),
            "factor_stride": factors.stride()[0],
        },
        {
            "grad": grad.data_ptr(),
            "grad_stride": grad.stride()[:4],
            "grad_weight": grad_weight.data_ptr(),
            "grad_temporal": grad_temporal.data_ptr() if temporal else 0,
        },
    )
    return grad_weight.to(grad.dtype), grad_temporal.to(grad.dtype)
