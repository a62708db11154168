"""The definition of merged states of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import NoOptions
from fastattn.backends.reference._masked import INF
from fastattn.backends.reference._vjp import backward_of


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
    inf has the whole weight; two states with an lse of inf have half of it each.
    """
    empty_a, empty_b = lse_a == -INF, lse_b == -INF
    wide = torch.promote_types(out_a.dtype, torch.float32)
    lse_dtype = torch.promote_types(wide, lse_a.dtype)
    # Replace -inf before operations whose result or derivative would be NaN, and also two lse of
    # inf, whose difference is NaN.
    infinite = (lse_a == INF) & (lse_b == INF)
    safe_a = torch.where(empty_a | infinite, 0.0, lse_a.to(lse_dtype))
    safe_b = torch.where(empty_b | infinite, 0.0, lse_b.to(lse_dtype))
    both = torch.logaddexp(safe_a, safe_b) + torch.where(infinite, INF, 0.0)
    lse = torch.where(empty_b, safe_a, both)
    lse = torch.where(empty_a, torch.where(empty_b, -INF, safe_b), lse)

    def weigh(out: Tensor, share: Tensor, empty: Tensor, alone: Tensor) -> Tensor:
        """share * out: 0 for an empty state, ``out`` itself if the other state is empty."""
        share = torch.where(empty, 0.0, torch.where(alone, 1.0, share)).to(wide)
        return share[..., None] * torch.where(empty[..., None], 0.0, out.to(wide))

    a = weigh(out_a, torch.sigmoid(safe_a - safe_b), empty_a, empty_b)
    b = weigh(out_b, torch.sigmoid(safe_b - safe_a), empty_b, empty_a)
    return (a + b).to(out_a.dtype), lse.to(lse_a.dtype)


merge_states_backward = backward_of(
    merge_states,
    results="out lse",
    takes="grad_out grad_lse out_a lse_a out_b lse_b",
    gives="out_a lse_a out_b lse_b",
)
