"""The definition of additive attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn.backends._precision import without_autocast
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions
from fastattn.backends.reference._dropout import dropout_keep, kept_scale
from fastattn.backends.reference._masked import (
    INF,
    compute_dtype,
    distances,
    softmax,
    visible_pairs,
    weighted_sum,
)
from fastattn.backends.reference._vjp import gradients

__all__ = ["additive_attention", "additive_attention_backward"]


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None,  # [A]
    attn_mask: Tensor | None,  # [B|1, Tq|1, Tk|1], bool (True takes part) or floating (added)
    seed: Tensor | None,  # [] int64
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Tq, Dv], w [B, Tq, Tk])``; w is empty unless ``weights``.

    Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473:

        e_ij = sum_a v_a tanh(query_ia + key_ja + bias_a)
        w_i  = softmax over j of e_ij + mask_ij, without excluded pairs; then dropout of head 0
        o_i  = sum_j w_ij value_j
    """
    out, applied = attend_additively(query, key, value, v, bias, attn_mask, seed, options)
    applied = applied if options.weights else applied.new_empty(0)
    return out.to(query.dtype), applied.to(query.dtype)


def additive_attention_backward(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    *,
    options: AdditiveBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, v, bias and the mask, in its own shape.

    They are the vector-Jacobian product of the forward, so they are differentiable again.
    """
    forward = functools.partial(additive_attention, options=options)
    arguments = (query, key, value, v, bias, attn_mask, seed)
    wanted = range(6 if options.needs_mask_grad else 5)
    return gradients(forward, arguments, wanted, (grad_out, grad_weights))[:6]


def attend_additively(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, w)`` in the dtype of the computation."""
    (batch, q_len, _), k_len = query.shape, key.shape[1]
    compute = compute_dtype(query.dtype)
    distance = distances(q_len, k_len, 0, query.device)
    visible = visible_pairs(distance, attn_mask, -1, 0 if options.causal else -1)
    with without_autocast(query.device.type):
        x = query.to(compute)[:, :, None] + key.to(compute)[:, None]  # [B, Tq, Tk, A]
        if bias is not None:
            x = x + bias.to(compute)
        if visible is not None:
            x = torch.where(visible[..., None], x, 0.0)  # keep NaN out of the derivative of tanh
        e = (torch.tanh(x) * v.to(compute)).sum(-1)  # [B, Tq, Tk]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            e = e + attn_mask.to(compute)
        if visible is not None:
            e = torch.where(visible, e, -INF)

        w, lse = softmax(e)
        if options.dropout_p > 0:
            assert seed is not None
            keep = dropout_keep((batch, 1, q_len, k_len), options.dropout_p, seed)[:, 0]
            w = torch.where(keep, w * kept_scale(options.dropout_p), 0.0)
        if visible is None:
            return w @ value.to(compute), w
        out = weighted_sum(w[:, None], value.to(compute)[:, None], (e != -INF)[:, None])[:, 0]
        # A fully masked row passes no gradient, even if the incoming gradient is inf.
        return torch.where(lse[..., None] == -INF, 0.0, out), w
