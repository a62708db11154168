"""What every adapter hands to the native module: dtypes, addresses and strides."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}


def operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def broadcast_operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """A dimension of size one is read with stride 0, so a mask is never expanded in memory."""
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), strides


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
