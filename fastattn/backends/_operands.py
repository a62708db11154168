"""How the adapters pass tensors to the native modules: addresses and strides."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = [
    "Operand",
    "address",
    "broadcast_operand",
    "encoding_operands",
    "operand",
    "packed_operand",
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
