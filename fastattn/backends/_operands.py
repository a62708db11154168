"""How the adapters pass tensors to the native modules: addresses and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Operand",
    "address",
    "broadcast_operand",
    "encoding_operands",
    "operand",
    "packed_operand",
    "program_operands",
    "table_for",
    "table_operands",
    "with_columns_together",
]

Operand = tuple[int, tuple[int, ...]]  # address and strides


def operand(tensor: Tensor) -> Operand:
    return tensor.data_ptr(), tensor.stride()


def broadcast_operand(tensor: Tensor) -> Operand:
    """Dimensions of size 1 get stride 0, so nothing is expanded in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    # From a list, because a generator is slower.
    return tensor.data_ptr(), tuple([0 if size == 1 else stride for size, stride in pairs])


def packed_operand(tensor: Tensor) -> Operand:
    """[T, H, D] as an operand [-, H, T, D]."""
    rows, heads, columns = tensor.stride()
    return tensor.data_ptr(), (0, heads, rows, columns)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def with_columns_together(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last dimension is contiguous."""
    return tensor if tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def table_for(query: Tensor, relative_bias: Tensor) -> Tensor:
    """Return the table as the kernels read it for this query: its last dimension contiguous."""
    needed = torch.float64 if query.dtype is torch.float64 else torch.float32
    if relative_bias.dtype is not needed:
        raise ValueError(
            f"relative_bias must be {needed} for a query of {query.dtype}, got "
            f"{relative_bias.dtype}"
        )
    return with_columns_together(relative_bias)


def table_operands(relative_bias: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """The named operands of a table whose last dimension is contiguous, and of its positions."""
    data, strides = broadcast_operand(relative_bias)
    operands: dict[str, Any] = {
        "relative_bias": data,
        "relative_bias_stride": strides[:2],
        "relative_bias_size": relative_bias.shape[2],
    }
    if positions is not None:
        _check_integers("positions", positions)
        operands["positions"] = positions.data_ptr()
        operands["positions_length"] = positions.numel()
    return operands


def program_operands(mask_program: Tensor) -> dict[str, Any]:
    """The named operands of a mask program."""
    _check_integers("mask_program", mask_program)
    return {"mask_program": mask_program.data_ptr(), "mask_length": mask_program.numel()}


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"{name} is not valid: it must be contiguous, of int32 and not empty, got "
            f"{tuple(tensor.shape)} of {tensor.dtype}"
        )


def encoding_operands(
    tokens: Tensor, factors: Tensor, weight: Tensor, temporal: Tensor | None
) -> dict[str, Any]:
    """The named operands of memory encoding; columns are contiguous."""
    return {
        "tokens": tokens.data_ptr(),
        "token_stride": tokens.stride(),
        "factors": factors.data_ptr(),
        "factor_stride": factors.stride()[0],
        "weight": operand(weight),
        "temporal": None if temporal is None else operand(temporal),
    }
