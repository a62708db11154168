"""Memory hops."""

from __future__ import annotations

from typing import cast

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import MemoryHopOptions
from naive._arrays import Array, array, masked, softmax, tensor, transposed


def memory_hop_attention(
    query: Tensor,  # [B, Q, D]; the primitive's arguments, all finite
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    *,
    options: MemoryHopOptions,
) -> tuple[Tensor, Tensor]:
    """Return out and weights in float64."""
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

    u, ps = array(query), []
    for k in range(hops):
        s = scale * (u @ transposed(m[b, in_at[k]])) + bias[:, :, k]
        p = np.where(seen[:, :, k], s, 0)
        if options.normalize == "softmax":
            p, _ = softmax(s, seen[:, :, k])
        ps.append(p)
        u = _phi(options.activation, u @ h[h_at[k]].T + p @ c[b, out_at[k]])
    return tensor(u), tensor(np.stack(ps, 2))


def _phi(name: str, x: Array) -> Array:
    """The activation of a state."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "tanh":
        return np.tanh(x)
    return cast(Array, 1 / (1 + np.exp(-x)) if name == "sigmoid" else x)
