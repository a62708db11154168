"""The definition of local attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions
from fastattn.backends.reference._masked import compute_dtype, without_autocast
from fastattn.backends.reference._vjp import gradients

__all__ = ["local_attention", "local_attention_backward"]


def local_attention(
    query: Tensor,  # [B, Lq, D]
    key: Tensor,  # [B, Lk, D]
    value: Tensor,  # [B, Lk, Dv]
    first: Tensor,  # [B, Lq] int64
    seen: Tensor,  # [B, Lq, W] bool
    factor: Tensor | None,  # [B, Lq, W]
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``: every query attends to W rows, starting at its ``first``.

    weights [B, Lq, W] = softmax(q . k) over the rows that exist and are ``seen``, 0 elsewhere, in
    the dtype of the computation; out [B, Lq, Dv] = sum weights factor v.
    """
    compute, keys = compute_dtype(query.dtype), key.shape[1]
    j = first[..., None] + torch.arange(seen.shape[2], device=query.device)
    seen = seen & (j >= 0) & (j < keys)
    if keys == 0:  # nothing to gather from, but the derivatives need the right shapes
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    at = torch.where(seen, j, 0)[..., None]
    with without_autocast(query.device.type):
        near, values = (
            torch.where(
                seen[..., None],
                x.to(compute)[:, None]
                .expand(-1, at.shape[1], -1, -1)
                .gather(2, at.expand(*at.shape[:3], x.shape[2])),
                0.0,
            )
            for x in (key, value)
        )
        some = seen.any(-1, keepdim=True)
        q = torch.where(some, query.to(compute), 0.0)  # a fully masked row passes no gradient
        scores = (near * q[:, :, None]).sum(-1)
        scores = torch.where(seen | ~some, scores, -torch.inf)
        weights = torch.where(seen, torch.softmax(scores, -1), 0.0)
        applied = (
            weights if factor is None else torch.where(seen, weights * factor.to(compute), 0.0)
        )
        out = (applied[..., None] * values).sum(2)
    return out.to(query.dtype), weights


def local_attention_backward(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    seen: Tensor,
    factor: Tensor | None,
    weights: Tensor | None,
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and factor; ``weights`` are recomputed."""
    forward = functools.partial(local_attention, options=options)
    arguments = (query, key, value, first, seen, factor)
    found = gradients(forward, arguments, (0, 1, 2, 5), (grad_out, grad_weights))
    return *found[:3], found[5]
