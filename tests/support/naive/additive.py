"""Additive attention."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import AdditiveOptions
from naive._arrays import (
    array,
    dropout,
    masked,
    softmax,
    softmax_backward,
    summed,
    tensor,
    transposed,
)

__all__ = ["additive_attention"]


def additive_attention(
    query: Tensor,  # the primitive's arguments, all finite
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    options: AdditiveOptions,
    grad_out: Tensor,
    grad_weights: Tensor | None,
) -> dict[str, Tensor]:
    """Return out, weights, and the gradient of every argument, by name, in float64."""
    q, k, x, vector = map(array, (query, key, value, v))
    hidden = q[:, :, None] + k[:, None]
    t = np.tanh(hidden if bias is None else hidden + array(bias))
    e, seen = masked((t * vector).sum(-1), attn_mask)
    p, _ = softmax(e, np.tril(seen) if options.causal else seen)
    batch, q_len, k_len = p.shape
    z = dropout((batch, 1, q_len, k_len), options.dropout_p, seed)[:, 0]
    w = p * z
    d_out = array(grad_out)
    d_w = d_out @ transposed(x)
    if grad_weights is not None:
        d_w = d_w + array(grad_weights)
    g = softmax_backward(p, d_w * z)
    h = g[..., None] * vector * (1 - t) * (1 + t)
    results = {
        "out": w @ x,
        "grad_query": h.sum(2),
        "grad_key": h.sum(1),
        "grad_value": transposed(w) @ d_out,
        "grad_v": (g[..., None] * t).sum((0, 1, 2)),
    }
    if options.weights:
        results["weights"] = w
    if bias is not None:
        results["grad_bias"] = h.sum((0, 1, 2))
    if attn_mask is not None and attn_mask.is_floating_point():
        results["grad_mask"] = summed(g, attn_mask)
    return {name: tensor(result) for name, result in results.items()}
