"""Arrays of long doubles, and the shared softmax."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastattn.backends.reference import dropout_keep

Array = NDArray[np.longdouble]


def array(x: Tensor) -> Array:
    return cast(Array, x.detach().double().numpy().astype(np.longdouble))


def tensor(x: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.astype(np.float64)))


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def masked(scores: Array, mask: Tensor | None) -> tuple[Array, NDArray[np.bool_]]:
    """The scores with an additive mask, and the visible pairs."""
    seen = np.ones(scores.shape, dtype=bool)
    if mask is None:
        return scores, seen
    if mask.dtype == torch.bool:
        return scores, seen & mask.numpy()
    added = array(mask)
    seen &= added != -np.inf
    return scores + np.where(seen, added, 0), seen


def softmax(scores: Array, seen: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The weights and the log-sum-exp; 0 and -inf for fully masked rows."""
    e = np.zeros_like(scores)
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    top[top == -np.inf] = 0
    np.exp(scores - top, out=e, where=seen)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return e / np.where(total == 0, 1, total), lse


def dropout(
    shape: tuple[int, int, int, int],
    probability: float,
    seed: Tensor | None,
    first: tuple[int, int, int] = (0, 0, 0),
) -> Array:
    """The factor of each weight [B, H, Lq, Lk]."""
    if seed is None:
        return np.ones(shape, np.longdouble)
    threshold = round((1 - probability) * 65536)
    keep = dropout_keep(shape, probability, seed, first).numpy()
    return cast(Array, keep * (np.longdouble(65536) / max(threshold, 1)))
