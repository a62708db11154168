"""Additive attention."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import AdditiveOptions
from naive._arrays import array, dropout, masked, softmax, tensor


def additive_attention(
    query: Tensor,  # the primitive's arguments, all finite
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return out and weights in float64."""
    q, k, x, vector = map(array, (query, key, value, v))
    hidden = q[:, :, None] + k[:, None]
    t = np.tanh(hidden if bias is None else hidden + array(bias))
    e, seen = masked((t * vector).sum(-1), attn_mask)
    p, _ = softmax(e, np.tril(seen) if options.causal else seen)
    batch, q_len, k_len = p.shape
    w = p * dropout((batch, 1, q_len, k_len), options.dropout_p, seed)[:, 0]
    return tensor(w @ x), tensor(w)
