"""What all adapters pass to the native module beside addresses and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._operands import broadcast_operand, operand

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def optional_operands(
    batch: int,
    heads: int,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,  # its last dimension is contiguous
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
) -> dict[str, Any]:
    """The operands that a call of attention has, by name; nothing is expanded in memory."""
    operands: dict[str, Any] = {}
    if attn_mask is not None:
        operands["mask"] = broadcast_operand(attn_mask)
        operands["mask_dtype"] = DTYPES[attn_mask.dtype]
    if alibi_slopes is not None:
        operands["alibi"], operands["alibi_stride"] = operand(alibi_slopes.expand(batch, heads))
    if sinks is not None:
        operands["sinks"], operands["sinks_stride"] = broadcast_operand(sinks)
    if relative_bias is not None:
        operands["relative_bias"], strides = broadcast_operand(relative_bias)
        operands["relative_bias_stride"] = strides[:2]
        operands["relative_bias_size"] = relative_bias.shape[2]
    if positions is not None:
        _check_integers("positions", positions)
        operands["positions"] = positions.data_ptr()
        operands["positions_length"] = positions.numel()
    if mask_program is not None:
        _check_integers("mask_program", mask_program)
        operands["mask_program"] = mask_program.data_ptr()
        operands["mask_length"] = mask_program.numel()
    if seed is not None:
        operands["seed"] = philox_key(seed)
    return operands


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"{name} is not valid: it must be contiguous, of int32 and not empty, got "
            f"{tuple(tensor.shape)} of {tensor.dtype}"
        )


def philox_key(seed: Tensor | None) -> int:
    """The key of the random draws as an unsigned 64-bit number; 0 without dropout."""
    return 0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
