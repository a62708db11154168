"""Additive attention on the CUDA kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import summed_to
from fastattn.backends.cuda.operands import MAX_LENGTH, launch, why_not_dtype, why_not_mask
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions

__all__ = ["additive_attention", "additive_attention_backward", "why_not"]


def why_not(query: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    reasons = why_not_dtype(query.dtype) + why_not_mask(attn_mask)
    if max(*query.shape, *value.shape[1:]) > MAX_LENGTH:
        reasons.append(f"a size is greater than {MAX_LENGTH}")
    return reasons


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None,  # [A]
    attn_mask: Tensor | None,  # [B|1, Tq|1, Tk|1]
    seed: Tensor | None,
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(out, weights or None)``, see ``docs/design.md``."""
    tensors = (query, key, value, v, bias, attn_mask, seed)
    results: Any = launch(_cuda.additive_attention, query, options, *tensors)
    return results


def additive_attention_backward(
    grad_out: Tensor | None,  # [B, Tq, Dv]
    grad_weights: Tensor | None,  # [B, Tq, Tk]
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
    """Return the gradients of query, key, value, v, bias and the mask, see ``docs/design.md``."""
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(*query.shape[:2], value.shape[2])
    tensors = (query, key, value, v, bias, attn_mask, seed)
    gradients = (grad_out, grad_weights)
    *grads, parts, of_scores = launch(
        _cuda.additive_attention_backward, query, options, *gradients, *tensors
    )
    grad_v, grad_bias = parts.sum((0, 1), dtype=torch.float64)
    grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_mask = summed_to(attn_mask, of_scores)
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grads[0], grads[1], grads[2], grad_v.to(v.dtype), grad_bias, grad_mask
