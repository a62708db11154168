"""Luong's attention to a local window, on complete matrices of scores."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from naive._arrays import (
    array,
    softmax,
    softmax_backward,
    tensor,
    transposed,
)

__all__ = ["luong_attention"]


def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    half: int,
    bell: bool,  # local-p
    grad_out: Tensor,
    grad_weights: Tensor | None,
) -> dict[str, Tensor]:
    """Return out, weights, and the gradient of every argument, by name, in float64."""
    q, k, x, at = map(array, (query, key, value, positions))
    distance = np.arange(k.shape[1]) - at[..., None]  # [B, Tq, Tk]
    seen = np.abs(distance) <= half
    if padding is not None:
        seen = seen & ~padding.numpy()[:, None]
    p, _ = softmax(q @ transposed(k), seen)
    factor = np.exp(-2 * (distance / half) ** 2) if bell else np.ones_like(p)
    w, g = p * factor, array(grad_out)
    d_w = g @ transposed(x)
    if grad_weights is not None:
        d_w = d_w + array(grad_weights)
    ds = softmax_backward(p, d_w * factor)
    results = {
        "out": w @ x,
        "grad_query": ds @ k,
        "grad_key": transposed(ds) @ q,
        "grad_value": transposed(w) @ g,
    }
    if grad_weights is not None:
        results["weights"] = w
    if bell:
        results["grad_positions"] = (d_w * w * 4 * distance / half**2).sum(-1)
    return {name: tensor(result) for name, result in results.items()}
