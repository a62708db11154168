"""Scaled dot-product attention, with every option of the primitive."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from naive._arrays import (
    Array,
    array,
    dropout,
    masked,
    softmax,
    softmax_backward,
    summed,
    tensor,
    transposed,
)
from naive._mask_program import visible_by_program

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_backward"]


def scaled_dot_product_attention(
    *tensors: Any, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, weights) in float64; arguments as for the primitive, all finite."""
    results = _forward(options, *tensors)
    w, v = results["w"], results["v"]
    wanted = {0: np.empty(0), 1: w, 2: w.sum(1) / max(w.shape[1], 1)}[options.weights]
    return tensor(w @ v), tensor(results["lse"]), tensor(wanted)


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
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor | None, ...]:
    """Return (dq, dk, dv, dmask, dsinks, dtable) in float64, None without the operand."""
    biases = (attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    f = _forward(options, query, key, value, *biases)
    q, k, v, p, w, z = (f[name] for name in ("q", "k", "v", "p", "w", "z"))
    heads = q.shape[1]
    if options.partial:  # of rows with more keys
        share = np.where(f["lse"] == -np.inf, 0, np.exp(f["lse"] - array(lse)))[..., None]
        p, w = p * share, w * share

    d_w = np.zeros_like(w)  # [B, Hq, Lq, Lk]
    d_v = np.zeros_like(v)
    if grad_out is not None:
        d_o = array(grad_out)
        d_w = d_w + d_o @ transposed(v)
        d_v = transposed(w) @ d_o
    if grad_weights is not None:
        d_weights = array(grad_weights)
        d_w = d_w + (d_weights[:, None] / heads if options.weights == 2 else d_weights)

    d_s = softmax_backward(p, d_w * z)
    if options.partial and grad_out is not None:
        d_s = p * (d_w * z - (array(grad_out) * array(out)).sum(-1, keepdims=True))
    d_sink = -f["p_sink"] * (p * d_w * z).sum(-1)
    if grad_lse is not None:
        d_s = d_s + p * array(grad_lse)[..., None]
        d_sink = d_sink + f["p_sink"] * array(grad_lse)
    d_sinks = None if sinks is None else tensor(summed(d_sink.sum(-1), sinks))
    d_table = None
    if relative_bias is not None:
        rows = np.zeros((relative_bias.shape[2], *d_s.shape[:2]), np.longdouble)
        index = _indices(relative_bias, positions, d_s.shape, options)
        np.add.at(rows, index, d_s.transpose(2, 3, 0, 1))
        d_table = tensor(summed(rows.transpose(1, 2, 0), relative_bias))
    d_mask = None
    if attn_mask is not None and options.needs_mask_grad:
        d_mask = tensor(summed(d_s, attn_mask))
    d_s = d_s * f["slope"] * options.scale

    def grouped(x: Array) -> Array:  # sum over the query heads of each group
        kv_heads = key.shape[1]
        if kv_heads == heads:
            return x
        return cast(Array, x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:]).sum(2))

    d_q, d_k = tensor(d_s @ k), tensor(grouped(transposed(d_s) @ q))
    return d_q, d_k, tensor(grouped(d_v)), d_mask, d_sinks, d_table


def _indices(
    table: Tensor, positions: Tensor | None, shape: tuple[int, ...], options: AttentionOptions
) -> Any:
    """The column [Lq, Lk] of the table of each pair."""
    places = np.arange(options.offset, options.offset + shape[2])
    keys = np.arange(shape[3])
    if positions is not None:
        places, keys = positions.numpy()[places], positions.numpy()
    return table.shape[2] // 2 + places[:, None] - keys


def _forward(
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
) -> dict[str, Array]:
    q, k, v = array(query), array(key), array(value)
    repeats = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    shape = (*q.shape[:3], k.shape[2])
    distance = np.arange(shape[2])[:, None] + options.offset - np.arange(shape[3])

    s = (q @ transposed(k)) * np.longdouble(options.scale)
    softcap_slope = np.ones_like(s)
    if options.softcap > 0:
        t = np.tanh(s / np.longdouble(options.softcap))
        s, softcap_slope = t * np.longdouble(options.softcap), 1 - t * t
    s, seen = masked(s, attn_mask)
    if relative_bias is not None:
        bias = array(relative_bias)[:, :, _indices(relative_bias, positions, shape, options)]
        s, seen = s + bias, seen & (bias != -np.inf)
    if options.window_left >= 0:
        seen &= distance <= options.window_left
    if options.window_right >= 0:
        seen &= distance >= -options.window_right
    if mask_program is not None:
        seen &= visible_by_program(mask_program, shape)
    if alibi_slopes is not None:
        s = s - array(alibi_slopes)[:, :, None, None] * np.abs(distance)
    sink = np.full((1, 1), -np.inf) if sinks is None else array(sinks)
    column = np.broadcast_to(sink[:, :, None, None], (*s.shape[:3], 1))
    p, lse = softmax(np.append(s, column, -1), np.append(seen, column != -np.inf, -1))
    p, p_sink = p[..., :-1], p[..., -1]
    first = options.first_query, options.first_key, options.first_head
    z = dropout(shape, options.dropout_p, seed, first)
    w = p * z
    named = {"q": q, "k": k, "v": v, "p": p, "w": w, "z": z, "lse": lse, "p_sink": p_sink}
    return named | {"slope": softcap_slope}
