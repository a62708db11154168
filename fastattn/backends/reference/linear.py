"""The definition of a linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.primitives import LinearBackwardOptions, LinearOptions


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, options: LinearOptions
) -> Tensor:
    """y = x Wᵀ + b, x [M, K], W [N, K], b [N] -> [M, N]"""
    wide = torch.promote_types(x.dtype, torch.float32)
    added = None if bias is None else bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), added).to(x.dtype)


def linear_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    options: LinearBackwardOptions,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx = dy W, dW = dyᵀ x, db = Σ dy; None for a gradient that is not needed."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dy, needed = grad_out.to(wide), options.needed
    return (
        (dy @ weight.to(wide)).to(x.dtype) if needed & 1 else None,
        (dy.mT @ x.to(wide)).to(x.dtype) if needed & 2 else None,
        dy.sum(0).to(x.dtype) if needed & 4 else None,
    )
