"""Memory hops."""

from __future__ import annotations

from typing import cast

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import MemoryHopOptions
from naive._arrays import (
    Array,
    array,
    masked,
    softmax,
    softmax_backward,
    summed,
    tensor,
    transposed,
)

__all__ = ["memory_hop_attention"]


def memory_hop_attention(
    query: Tensor,  # [B, Q, D]; the primitive's arguments, all finite
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    options: MemoryHopOptions,
    grad_out: Tensor,
    grad_weights: Tensor | None,
) -> dict[str, Tensor]:
    """Return out, weights, and the gradient of every argument, by name, in float64."""
    batch, queries, width = query.shape
    hops, scale = options.hops, np.longdouble(options.scale)
    rows = in_memory.shape[2]
    b, full = np.arange(batch), (batch, queries, hops, rows)
    m, c = (
        np.broadcast_to(array(x), (batch, *x.shape[1:]))
        for x in (in_memory, in_memory if out_memory is None else out_memory)
    )
    in_at = [k if m.shape[1] > 1 else 0 for k in range(hops)]
    out_at = [
        (k if out_memory is not None else k + 1) if c.shape[1] > 1 else 0 for k in range(hops)
    ]
    h = np.eye(width, dtype=np.longdouble)[None] if hop_proj is None else array(hop_proj)
    h_at = [k if h.shape[0] > 1 else 0 for k in range(hops)]
    bias, seen = masked(np.zeros(full, np.longdouble), memory_bias)
    if memory_mask is not None:
        seen &= memory_mask.numpy()

    u, us, ps, ys = array(query), [], [], []
    for k in range(hops):
        s = scale * (u @ transposed(m[b, in_at[k]])) + bias[:, :, k]
        p = np.where(seen[:, :, k], s, 0)
        if options.normalize == "softmax":
            p, _ = softmax(s, seen[:, :, k])
        us.append(u)
        ps.append(p)
        u = _phi(options.activation, u @ h[h_at[k]].T + p @ c[b, out_at[k]])
        ys.append(u)

    dm, dc = np.zeros(m.shape, np.longdouble), np.zeros(c.shape, np.longdouble)
    dh, dbias = np.zeros(h.shape, np.longdouble), np.zeros(full, np.longdouble)
    g = array(grad_out)
    dw = np.zeros(full, np.longdouble) if grad_weights is None else array(grad_weights)
    for k in reversed(range(hops)):
        g = g * _dphi(options.activation, ys[k])
        dc[:, out_at[k]] += transposed(ps[k]) @ g
        dh[h_at[k]] += np.einsum("bqi,bqj->ij", g, us[k])
        dp = g @ transposed(c[b, out_at[k]]) + dw[:, :, k]
        ds = np.where(seen[:, :, k], dp, 0)
        if options.normalize == "softmax":
            ds = softmax_backward(ps[k], dp)
        dbias[:, :, k] = ds
        ds = scale * ds
        dm[:, in_at[k]] += transposed(ds) @ us[k]
        g = g @ h[h_at[k]] + ds @ m[b, in_at[k]]
    if out_memory is None:
        dm = dm + dc
    results = {"out": u, "grad_query": g, "grad_in_memory": summed(dm, in_memory)}
    if options.weights:
        results["weights"] = np.stack(ps, 2)
    if out_memory is not None:
        results["grad_out_memory"] = summed(dc, out_memory)
    if hop_proj is not None:
        results["grad_hop_proj"] = dh
    if memory_bias is not None:
        results["grad_memory_bias"] = summed(dbias, memory_bias)
    return {name: tensor(x) for name, x in results.items()}


def _phi(name: str, x: Array) -> Array:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "tanh":
        return np.tanh(x)
    return cast(Array, 1 / (1 + np.exp(-x)) if name == "sigmoid" else x)


def _dphi(name: str, y: Array) -> Array:
    """The derivative, from the value."""
    if name == "relu":
        return (y > 0).astype(np.longdouble)
    if name == "tanh":
        return 1 - y * y
    return cast(Array, y * (1 - y) if name == "sigmoid" else np.ones_like(y))
