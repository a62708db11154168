"""What all adapters pass to the native module beside addresses and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu, compat
from fastattn.backends._alloc import empty_output
from fastattn.backends._operands import (
    broadcast_operand,
    operand,
    program_operands,
    table_operands,
)
from fastattn.backends._precision import allows_bf16_parts

_cpu.use_torch(torch, compat.exchange_interface)
_cpu.use_rules(empty_output, allows_bf16_parts)

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
        operands |= table_operands(relative_bias, positions)
    if mask_program is not None:
        operands |= program_operands(mask_program)
    if seed is not None:
        operands["seed"] = philox_key(seed)
    return operands


def philox_key(seed: Tensor | None) -> int:
    """The key of the random draws as an unsigned 64-bit number; 0 without dropout."""
    return 0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
