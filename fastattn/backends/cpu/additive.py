"""The adapter of additive attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions


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
    return _cpu.additive_attention(options, query, key, value, v, bias, attn_mask, seed)


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
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, v, bias and the mask, see ``docs/design.md``."""
    tensors = (query, key, value, v, bias, attn_mask, seed)
    grads: Any = _cpu.additive_attention_backward(options, grad_out, grad_weights, *tensors)
    grad_query, grad_key, grad_value, *others = grads
    return grad_query, grad_key, grad_value, *map(_as, others, (v, bias, attn_mask))


def _as(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """The gradient in the dtype of its tensor."""
    if grad is None or tensor is None or grad.dtype is tensor.dtype:
        return grad
    return grad.to(tensor.dtype)
