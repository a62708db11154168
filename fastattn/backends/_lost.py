"""Queries of local attention whose position is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nan_where_lost(
    positions: Tensor,  # [B, Lq]
    padding: Tensor | None,  # [B, Lk] bool
    query: Tensor,  # [B, Lq, D]
    rows: Sequence[Tensor],  # [B, Lk, D]
    *more_inputs: Tensor,  # [B, Lq] or []
) -> Tensor:
    """NaN [B, Lq, 1] for each query at NaN that has a key, else 0, to add to its results.

    Any key that is not padding may be in the window of such a query. So the gradients of the query,
    of all these keys and of ``others`` are NaN.
    """
    lost = positions.detach().isnan()
    read = query.sum(-1)
    for x in rows:
        if padding is not None:
            x = torch.where(padding[..., None], 0.0, x)
        read = read + x.flatten(1).sum(1, keepdim=True)
    for x in more_inputs:
        read = read + x
    if padding is not None:
        lost = lost & ~padding.all(1, keepdim=True)
    elif rows[0].shape[1] == 0:
        lost = torch.zeros_like(lost)
    # Selected before and after the product, so that NaN in other queries or in their gradients has
    # no effect.
    return (torch.where(lost, read, 0.0) * torch.where(lost, torch.nan, 0.0))[..., None]
