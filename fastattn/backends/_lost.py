"""Lost queries: queries of local attention whose position is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nan_where_lost(
    positions: Tensor,  # [B, Lq]
    padding: Tensor | None,  # [B, Lk] bool
    query: Tensor,  # [B, Lq, D]
    keys_and_values: Sequence[Tensor],  # [B, Lk, D]
    *more_inputs: Tensor,  # [B, Lq] or []
) -> Tensor:
    """Return [B, Lq, 1] to add to results: NaN for a lost query that has a key, else 0.

    Any key that is not padding may be in the window of a lost query. So the gradients of the query,
    of all these keys and values and of ``more_inputs`` are NaN, too.
    """
    lost = positions.detach().isnan()
    input_sum = query.sum(-1)
    for x in keys_and_values:
        if padding is not None:
            x = torch.where(padding[..., None], 0.0, x)
        input_sum = input_sum + x.flatten(1).sum(1, keepdim=True)
    for x in more_inputs:
        input_sum = input_sum + x
    if padding is not None:
        lost = lost & ~padding.all(1, keepdim=True)
    elif keys_and_values[0].shape[1] == 0:
        lost = torch.zeros_like(lost)
    # Selected before and after the product, so that NaN in other queries or in their gradients has
    # no effect.
    return (torch.where(lost, input_sum, 0.0) * torch.where(lost, torch.nan, 0.0))[..., None]
