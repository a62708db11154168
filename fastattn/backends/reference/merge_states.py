"""The definition of merged states of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions
from fastattn.backends.reference._masked import INF

__all__ = ["merge_states", "merge_states_backward"]


def merge_states(
    out_a: Tensor,  # [..., L, Dv]
    lse_a: Tensor,  # [..., L] float32 or float64
    out_b: Tensor,  # [..., L, Dv]
    lse_b: Tensor,  # [..., L]
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``: lse = log(e^lse_a + e^lse_b), out = sum of e^(lse_n - lse) out_n.

    A state whose lse is -inf contributes nothing, whatever its output holds. A state whose lse is
    inf has the whole weight; two such states share it.
    """
    empty_a, empty_b = lse_a == -INF, lse_b == -INF
    wide = torch.promote_types(out_a.dtype, torch.float32)
    of_rows = torch.promote_types(wide, lse_a.dtype)
    # Replace -inf before operations whose result or derivative would be NaN, and also two lse of
    # inf, whose difference is NaN.
    infinite = (lse_a == INF) & (lse_b == INF)
    safe_a = torch.where(empty_a | infinite, 0.0, lse_a.to(of_rows))
    safe_b = torch.where(empty_b | infinite, 0.0, lse_b.to(of_rows))
    both = torch.logaddexp(safe_a, safe_b) + torch.where(infinite, INF, 0.0)
    lse = torch.where(empty_b, safe_a, both)
    lse = torch.where(empty_a, torch.where(empty_b, -INF, safe_b), lse)

    def part(out: Tensor, share: Tensor, empty: Tensor, alone: Tensor) -> Tensor:
        share = torch.where(empty, 0.0, torch.where(alone, 1.0, share)).to(wide)
        return share[..., None] * torch.where(empty[..., None], 0.0, out.to(wide))

    a = part(out_a, torch.sigmoid(safe_a - safe_b), empty_a, empty_b)
    b = part(out_b, torch.sigmoid(safe_b - safe_a), empty_b, empty_a)
    return (a + b).to(out_a.dtype), lse.to(lse_a.dtype)


def merge_states_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    options: NoOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of out_a, lse_a, out_b and lse_b."""
    leaves = (out_a, lse_a, out_b, lse_b)
    given = [(n, grad) for n, grad in enumerate((grad_out, grad_lse)) if grad is not None]
    if not given:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)  # type: ignore[return-value]

    def forward(*leaves: Tensor) -> Any:
        results = merge_states(*leaves, options=options)
        return tuple(results[n] for n, _ in given)

    grads: Any = torch.func.vjp(forward, *leaves)[1](tuple(grad for _, grad in given))
    return tuple(grads)
