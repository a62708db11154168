"""Attention written a second time, in NumPy, with its gradients by hand, in extended precision.

It shares no line with ``backends/reference/`` (but for the dropout mask, which is integer
arithmetic with known answers), so each checks the other; and it is the only reference more exact
than a float64 kernel, where ``numpy.longdouble`` is wider than float64, as on x86.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.backends.reference import dropout_keep

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_backward"]

Array = NDArray[np.longdouble]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, weights) in float64; arguments as for the primitive, all finite."""
    results = _forward(query, key, value, attn_mask, alibi_slopes, seed, options)
    w, v = results["w"], results["v"]
    wanted = {0: np.empty(0), 1: w, 2: w.sum(1) / max(w.shape[1], 1)}[options.weights]
    return _tensor(w @ v), _tensor(results["lse"]), _tensor(wanted)


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (dq, dk, dv, dmask) in float64."""
    f = _forward(query, key, value, attn_mask, alibi_slopes, seed, options)
    q, k, v, p, w, z = (f[name] for name in ("q", "k", "v", "p", "w", "z"))
    heads = q.shape[1]

    d_w = np.zeros_like(w)  # [B, Hq, Lq, Lk]
    d_v = np.zeros_like(v)
    if grad_out is not None:
        d_o = _array(grad_out)
        d_w = d_w + d_o @ _t(v)
        d_v = _t(w) @ d_o
    if grad_weights is not None:
        d_weights = _array(grad_weights)
        d_w = d_w + (d_weights[:, None] / heads if options.weights == 2 else d_weights)

    d_p = d_w * z
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    if grad_lse is not None:
        d_s = d_s + p * _array(grad_lse)[..., None]
    d_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        axes = tuple(n for n, size in enumerate(attn_mask.shape) if size == 1)
        d_mask = _tensor(d_s.sum(axes, keepdims=True))
    d_s = d_s * f["softcap_slope"] * options.scale

    def grouped(x: Array) -> Array:  # the query heads of a group add up to the gradient of its key
        kv_heads = key.shape[1]
        if kv_heads == heads:
            return x
        return cast(Array, x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:]).sum(2))

    return _tensor(d_s @ k), _tensor(grouped(_t(d_s) @ q)), _tensor(grouped(d_v)), d_mask


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    options: AttentionOptions,
) -> dict[str, Array]:
    q, k, v = _array(query), _array(key), _array(value)
    repeats = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    shape = (*q.shape[:3], k.shape[2])
    distance = np.arange(shape[2])[:, None] + options.offset - np.arange(shape[3])

    s = (q @ _t(k)) * np.longdouble(options.scale)
    softcap_slope = np.ones_like(s)
    if options.softcap > 0:
        t = np.tanh(s / np.longdouble(options.softcap))
        s, softcap_slope = t * np.longdouble(options.softcap), 1 - t * t
    hidden = np.zeros(shape, dtype=bool)
    if options.window_left >= 0:
        hidden |= distance > options.window_left
    if options.window_right >= 0:
        hidden |= distance < -options.window_right
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden |= ~attn_mask.numpy()
    elif attn_mask is not None:
        hidden |= _array(attn_mask) == -np.inf
        s = s + _array(attn_mask)
    if alibi_slopes is not None:
        s = s - _array(alibi_slopes)[:, :, None, None] * np.abs(distance)

    e = np.zeros_like(s)
    top = np.where(hidden, -np.inf, s).max(-1, keepdims=True, initial=-np.inf)
    top[top == -np.inf] = 0
    np.exp(s - top, out=e, where=~hidden)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = e / np.where(total == 0, 1, total)
    z = np.ones_like(p)
    if options.dropout_p > 0:
        assert seed is not None
        threshold = round((1 - options.dropout_p) * 65536)
        keep = dropout_keep(shape, options.dropout_p, seed).numpy()
        z = keep * (np.longdouble(65536) / max(threshold, 1))
    w = p * z
    return {
        "q": q,
        "k": k,
        "v": v,
        "p": p,
        "w": w,
        "z": z,
        "lse": lse,
        "softcap_slope": softcap_slope,
    }


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _array(x: Tensor) -> Array:
    return x.detach().double().numpy().astype(np.longdouble)


def _tensor(x: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.astype(np.float64)))
