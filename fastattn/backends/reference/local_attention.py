"""The definition of local attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends._lost import nan_where_lost
from fastattn.backends._precision import without_autocast
from fastattn.backends.primitives import LocalOptions
from fastattn.backends.reference._masked import compute_dtype
from fastattn.backends.reference._vjp import backward_of


def local_attention(
    query: Tensor,  # [B, Lq, D]
    key: Tensor,  # [B, Lk, D]
    value: Tensor,  # [B, Lk, Dv]
    positions: Tensor,  # [B, Lq]
    padding: Tensor | None,  # [B, Lk] bool
    factor: Tensor | None,  # [B, Lq, W], W = min(2 reach + 1, Lk)
    *,
    options: LocalOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``: query i attends to the keys within ``reach`` of its position.

    weights [B, Lq, W] = softmax(q . k) over the keys j from max(0, ceil(p - reach)) on that exist,
    are in reach and are not padding, 0 elsewhere, in the dtype of the computation; out [B, Lq, Dv]
    = sum weights bell factor v, bell = exp(-2 ((j - p) / reach)^2) or 1. A query at NaN has NaN in
    both, unless all keys are padding.
    """
    nan_in_weights = nan_where_lost(positions, padding, query, (key,))
    bell_inputs = (positions,) if options.bell else ()
    nan_in_out = nan_where_lost(positions, padding, query, (key, value), *bell_inputs)
    compute, keys, reach = compute_dtype(query.dtype), key.shape[1], options.reach
    position = positions.detach()[..., None]
    first_key = torch.ceil(position - reach).clamp(0, keys).long()
    j = first_key + torch.arange(options.window_size(keys), device=query.device)
    visible = (j >= 0) & (j < keys) & (j <= position + reach)
    if keys == 0:  # nothing to gather from, but the derivatives need the right shapes
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        padding = None
    index = torch.where(visible, j, 0)
    if padding is not None:
        visible = visible & ~padding[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    with without_autocast(query.device.type):
        keys_in_window, values = (
            torch.where(
                visible[..., None],
                x.to(compute)[:, None]
                .expand(-1, index.shape[1], -1, -1)
                .gather(2, index[..., None].expand(*index.shape, x.shape[2])),
                0.0,
            )
            for x in (key, value)
        )
        any_visible = visible.any(-1, keepdim=True)
        # A fully masked row passes no gradient.
        q = torch.where(any_visible, query.to(compute), 0.0)
        scores = (keys_in_window * q[:, :, None]).sum(-1)
        scores = torch.where(visible | ~any_visible, scores, -torch.inf)
        weights = torch.where(visible, torch.softmax(scores, -1), 0.0)
        applied = weights
        if options.bell:
            distance = torch.where(visible, j - positions[..., None], 0.0)
            applied = applied * torch.exp(-2 * (distance / reach) ** 2)
        if factor is not None:
            applied = torch.where(visible, applied * factor.to(compute), 0.0)
        out = (applied[..., None] * values).sum(2) + nan_in_out
    return out.to(query.dtype), weights + nan_in_weights


local_attention_backward = backward_of(
    local_attention,
    results="out weights",
    takes="grad_out grad_weights query key value positions padding factor weights",
    gives="query key value positions",
)
