"""The adapter of merged states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._states import flattened
from fastattn.backends.primitives import NoOptions


def merge_states(
    out_a: Tensor,  # [..., L, Dv]
    lse_a: Tensor,  # [..., L] float32 or float64
    out_b: Tensor,  # [..., L, Dv]
    lse_b: Tensor,  # [..., L]
    *,
    options: NoOptions,
) -> tuple[Tensor, ...]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    states = (out_a, lse_a, out_b, lse_b)
    if out_a.ndim <= 4:
        return _cpu.merge_states(*states)
    return _unflattened(_cpu.merge_states(*flattened(states)), states)


def merge_states_backward(
    grad_out: Tensor | None,  # [..., L, Dv]
    grad_lse: Tensor | None,  # [..., L]
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    options: NoOptions,
) -> tuple[Tensor, ...]:
    """Return the gradients of out_a, lse_a, out_b and lse_b, see ``docs/design.md``."""
    states = (out_a, lse_a, out_b, lse_b)
    if out_a.ndim <= 4:
        return _cpu.merge_states_backward(grad_out, grad_lse, *states)
    tensors = flattened((grad_out, grad_lse, *states))
    return _unflattened(_cpu.merge_states_backward(*tensors), states)


def _unflattened(results: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results in the shapes and the memory order of these tensors."""
    found = []
    for result, x in zip(results, like, strict=False):
        made, result = torch.empty_like(x), result.view(x.shape)
        found.append(result if result.stride() == made.stride() else made.copy_(result))
    return tuple(found)
