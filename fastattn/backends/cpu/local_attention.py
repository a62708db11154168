"""The adapter of local attention."""

from __future__ import annotations

from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import LocalOptions


def local_attention(
    query: Tensor,  # [B, Lq, D]
    key: Tensor,  # [B, Lk, D]
    value: Tensor,  # [B, Lk, Dv]
    positions: Tensor,  # [B, Lq]
    padding: Tensor | None,  # [B, Lk] bool
    factor: Tensor | None,  # [B, Lq, W]
    *,
    options: LocalOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    return _cpu.local_attention(options, query, key, value, positions, padding, factor)


def local_attention_backward(
    grad_out: Tensor | None,  # [B, Lq, Dv]
    grad_weights: Tensor | None,  # [B, Lq, W]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    factor: Tensor | None,
    weights: Tensor,
    *,
    options: LocalOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and positions, see ``docs/design.md``."""
    tensors = (query, key, value, positions, padding, factor, weights)
    *grads, grad_positions = _cpu.local_attention_backward(
        options, grad_out, grad_weights, *tensors
    )
    if grad_positions.dtype is not positions.dtype:
        grad_positions = grad_positions.to(positions.dtype)
    return grads[0], grads[1], grads[2], grad_positions
