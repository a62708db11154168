"""The merge of two states of attention."""

from __future__ import annotations

from typing import cast

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import NoOptions
from naive._arrays import Array, array, tensor


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, options: NoOptions
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in float64; outputs must be finite, except where lse is -inf."""
    a, b, lse = _shares(lse_a, lse_b)
    return tensor(a[..., None] * _held(out_a, lse_a) + b[..., None] * _held(out_b, lse_b)), lse


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Array, Array, Tensor]:
    """e^(lse_a - lse), e^(lse_b - lse) and lse."""
    a, b = array(lse_a), array(lse_b)
    top = np.maximum(a, b)
    top = np.where(top == -np.inf, 0, top)
    with np.errstate(divide="ignore", invalid="ignore"):  # inf - inf
        x, y = (np.where(each == top, 1, np.exp(each - top)) for each in (a, b))
        lse = np.where(x + y == 0, -np.inf, top + np.log1p(np.minimum(x, y)))
    total = np.where(x + y == 0, 1, x + y)
    return cast(Array, x / total), cast(Array, y / total), tensor(lse)


def _held(out: Tensor, lse: Tensor) -> Array:
    """The output of a state; 0 for an empty one."""
    return np.where(array(lse)[..., None] == -np.inf, 0, array(out))
