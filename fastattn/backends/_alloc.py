"""The memory and the shapes of results and masks, for the kernels and for the compiler alike."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_output(query: Tensor, width: int) -> Tensor:
    """Return an empty [B, H, L, width] for a query [B, H, L, D], in the query's memory order.

    B, H and L have the order of ``torch.empty_like(query)``, and the last dimension is contiguous.
    So the heads of a projection [B, L, H, D] can be merged again without a copy.
    """
    if query.shape[-1] == width:
        like = torch.empty_like(query)
        # The last stride is not 1 if query is transposed, or if its rows overlap (sliding windows).
        if like.stride()[-1] == 1:  # faster than stride(-1)
            return like
    if query.shape[-1] == 0:  # an empty tensor has no memory order
        return query.new_empty((*query.shape[:-1], width))
    rows = torch.empty_like(query[..., 0])  # [B, H, L]
    strides = [width * stride for stride in rows.stride()]
    return torch.empty_strided(
        (*rows.shape, width), (*strides, 1), dtype=query.dtype, device=query.device
    )


def narrow_expanded(mask: Tensor) -> Tensor:
    """Narrow every expanded (stride 0) dimension of a mask to size 1."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def summed_to(bias: Tensor, grad: Tensor) -> Tensor:
    """Sum a gradient in the shape of the scores to the shape and dtype of a bias or a mask.

    Sums in float64, because one element may be the sum of thousands of terms.
    """
    extra_dims = grad.ndim - bias.ndim  # leading dimensions, such as of partial sums
    sizes = [None] * extra_dims + list(bias.shape)
    size_pairs = zip(sizes, grad.shape, strict=True)
    if dims := [dim for dim, (size, expanded) in enumerate(size_pairs) if size != expanded]:
        grad = grad.sum(dims, keepdim=True, dtype=torch.float64)
    return (grad.view(bias.shape) if extra_dims else grad).to(bias.dtype)
