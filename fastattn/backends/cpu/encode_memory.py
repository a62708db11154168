"""The adapters of memory encoding."""

from __future__ import annotations

from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions


def encode_memory(
    tokens: Tensor,  # [R, B, N, J] int64
    weight: Tensor,  # [R, G, V, D]
    factors: Tensor,  # [J, D] float32, float64 for float64
    temporal: Tensor | None,  # [R, G, N, D]
    *,
    options: EncodeMemoryOptions,
) -> Tensor:
    """Return the memories [R, B, G, N, D], see ``docs/design.md``."""
    return _cpu.encode_memory(options, tokens, weight, factors, temporal)


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,
    factors: Tensor,
    *,
    options: EncodeMemoryBackwardOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and temporal, see ``docs/design.md``."""
    grads = _cpu.encode_memory_backward(options, grad, tokens, factors)
    grad_weight, grad_temporal = (x if x is None else x.to(grad.dtype) for x in grads)
    assert grad_weight is not None
    return grad_weight, grad_temporal
