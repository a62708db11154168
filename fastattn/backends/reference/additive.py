"""The definition of additive attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends._precision import without_autocast
from fastattn.backends.primitives import AdditiveOptions
from fastattn.backends.reference._dropout import dropout_keep, kept_scale
from fastattn.backends.reference._masked import (
    INF,
    compute_dtype,
    distances,
    softmax,
    visible_pairs,
    weighted_sum,
)
from fastattn.backends.reference._vjp import backward_of


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
            out = w @ value.to(compute)
        else:
            out = weighted_sum(w[:, None], value.to(compute)[:, None], (e != -INF)[:, None])[:, 0]
            # A fully masked row passes no gradient, even if the incoming one is inf.
            out = torch.where(lse[..., None] == -INF, 0.0, out)
    applied = w if options.weights else w.new_empty(0)
    return out.to(query.dtype), applied.to(query.dtype)


additive_attention_backward = backward_of(
    additive_attention,
    results="out weights",
    takes="grad_out grad_weights query key value v bias attn_mask seed",
    gives="query key value v bias attn_mask",
)
