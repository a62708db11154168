"""Memory hops written a second time, in NumPy, with their gradients by hand, in extended precision.

It shares no line with the reference backend, so each checks the other; and it is the only reference
more exact than a float64 kernel, where ``numpy.longdouble`` is wider than float64, as on x86.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastattn.backends.primitives import MemoryHopOptions

__all__ = ["results_and_gradients"]

Array = NDArray[np.longdouble]


def results_and_gradients(
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
    b, d = np.arange(batch), width
    full = (batch, queries, hops, rows)
    m = np.broadcast_to(_array(in_memory), (batch, *in_memory.shape[1:]))
    c = (
        m
        if out_memory is None
        else np.broadcast_to(_array(out_memory), (batch, *out_memory.shape[1:]))
    )
    in_at = [k if m.shape[1] > 1 else 0 for k in range(hops)]
    out_at = [
        (k if out_memory is not None else k + 1) if c.shape[1] > 1 else 0 for k in range(hops)
    ]
    h = np.eye(d, dtype=np.longdouble)[None] if hop_proj is None else _array(hop_proj)
    h_at = [k if h.shape[0] > 1 else 0 for k in range(hops)]
    bias = np.zeros(full, np.longdouble)
    if memory_bias is not None:
        bias = np.broadcast_to(_array(memory_bias), full)
    seen = np.ones(full, bool)
    if memory_mask is not None:
        seen = np.broadcast_to(memory_mask.numpy(), full)

    u, us, ps, ys = _array(query), [], [], []
    for k in range(hops):
        s = scale * (u @ m[b, in_at[k]].swapaxes(1, 2)) + bias[:, :, k]
        p = np.where(seen[:, :, k], s, 0)
        if options.normalize == "softmax":
            top = np.where(seen[:, :, k], s, -np.inf).max(-1, keepdims=True, initial=-1e300)
            e = np.where(seen[:, :, k], np.exp(np.minimum(s - top, 0)), 0)
            total = e.sum(-1, keepdims=True)
            p = e / np.where(total == 0, 1, total)
        us.append(u)
        ps.append(p)
        u = _phi(options.activation, u @ h[h_at[k]].T + p @ c[b, out_at[k]])
        ys.append(u)

    dm, dc = np.zeros(m.shape, np.longdouble), np.zeros(c.shape, np.longdouble)
    dh, dbias = np.zeros(h.shape, np.longdouble), np.zeros(full, np.longdouble)
    g = _array(grad_out)
    dw = np.zeros(full, np.longdouble) if grad_weights is None else _array(grad_weights)
    for k in reversed(range(hops)):
        g = g * _dphi(options.activation, ys[k])
        dc[:, out_at[k]] += ps[k].swapaxes(1, 2) @ g
        dh[h_at[k]] += np.einsum("bqi,bqj->ij", g, us[k])
        dp = g @ c[b, out_at[k]].swapaxes(1, 2) + dw[:, :, k]
        ds = np.where(seen[:, :, k], dp, 0)
        if options.normalize == "softmax":
            ds = ps[k] * (dp - (ps[k] * dp).sum(-1, keepdims=True))
        dbias[:, :, k] = ds
        ds = scale * ds
        dm[:, in_at[k]] += ds.swapaxes(1, 2) @ us[k]
        g = g @ h[h_at[k]] + ds @ m[b, in_at[k]]
    if out_memory is None:
        dm = dm + dc
    results = {"out": u, "grad of query": g, "grad of in_memory": _summed(dm, in_memory)}
    if options.weights:
        results["weights"] = np.stack(ps, 2)
    if out_memory is not None:
        results["grad of out_memory"] = _summed(dc, out_memory)
    if hop_proj is not None:
        results["grad of hop_proj"] = dh
    if memory_bias is not None:
        results["grad of memory_bias"] = _summed(dbias, memory_bias)
    return {name: torch.from_numpy(x.astype(np.float64)) for name, x in results.items()}


def _array(x: Tensor) -> Array:
    return cast(Array, x.detach().double().numpy().astype(np.longdouble))


def _phi(name: str, x: Array) -> Array:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "tanh":
        return np.tanh(x)
    return cast(Array, 1 / (1 + np.exp(-x)) if name == "sigmoid" else x)


def _dphi(name: str, y: Array) -> Array:
    """The derivative, by the value."""
    if name == "relu":
        return (y > 0).astype(np.longdouble)
    if name == "tanh":
        return 1 - y * y
    return cast(Array, y * (1 - y) if name == "sigmoid" else np.ones_like(y))


def _summed(grad: Array, like: Tensor) -> Array:
    axes = tuple(n for n, size in enumerate(like.shape) if size == 1 and grad.shape[n] != 1)
    return cast(Array, grad.sum(axes, keepdims=True)) if axes else grad
