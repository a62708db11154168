"""The sinusoidal encoding of any rank, on kernels of at most four dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["of_any_rank"]


def of_any_rank(
    encode: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],  # x, positions, out
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L], broadcasts to x
) -> Tensor:
    """Leading dimensions that cannot be merged are copied."""
    if x.ndim <= 4:
        return encode(x, positions, None)
    out = torch.empty_like(x)
    target = out.flatten(0, -4)
    if positions is not None:
        positions = positions.expand(x.shape[:-1]).flatten(0, -3)
    encode(x.flatten(0, -4), positions, target)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
