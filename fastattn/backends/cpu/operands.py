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
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    # From a list, which takes less time than a generator.
    strides = tuple([0 if size == 1 else stride for size, stride in pairs])
    return tensor.data_ptr(), strides


def with_columns_together(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose last dimension is the innermost."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def slopes_operand(
    alibi_slopes: Tensor | None, batch: int, heads: int
) -> tuple[int, tuple[int, ...]] | None:
    """[B|1, H] for every sequence, without being expanded in memory."""
    return None if alibi_slopes is None else operand(alibi_slopes.expand(batch, heads))


def philox_key(seed: Tensor | None) -> int:
    """The key of the draws, as 64 bits without a sign; 0 where nothing is drawn."""
    return 0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
