"""Luong's attention to a local window, on complete matrices of scores."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from naive._arrays import array, softmax, tensor, transposed


def luong_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    half: int,
    bell: bool,  # local-p
) -> tuple[Tensor, Tensor]:
    """Return out and weights in float64."""
    q, k, x, at = map(array, (query, key, value, positions))
    distance = np.arange(k.shape[1]) - at[..., None]  # [B, Tq, Tk]
    seen = np.abs(distance) <= half
    if padding is not None:
        seen = seen & ~padding.numpy()[:, None]
    p, _ = softmax(q @ transposed(k), seen)
    w = p * np.exp(-2 * (distance / half) ** 2) if bell else p
    return tensor(w @ x), tensor(w)
