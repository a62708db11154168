"""The gradients of a part of the keys, where ``out`` and ``lse`` are the results of all keys.

The results of all keys are the merge of the results of this part and of the other keys. So the
derivative goes through the merge first, and then through attention to this part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions

__all__ = ["gradients_of_part", "partial_gradients"]


def gradients_of_part(
    grad_out: Tensor | None,  # [..., Dv]
    grad_lse: Tensor | None,  # [...]
    part: Tensor,  # out_s [..., Dv], of this part of the keys
    lse_of_part: Tensor,  # [...]
    out: Tensor,  # [..., Dv] of all keys
    lse: Tensor,  # [...]
) -> tuple[Tensor | None, Tensor]:
    """The derivative of a merge of states, from out and lse to one of them:

    dout_s = w dout,  dlse_s = w (dlse + sum(dout (out_s - out))),  w = exp(lse_s - lse)
    """
    share = torch.where(lse_of_part == -torch.inf, 0.0, (lse_of_part - lse).exp())
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    if grad_out is not None:
        wide = torch.promote_types(grad_out.dtype, torch.float32)
        grad_lse = grad_lse + (grad_out.to(wide) * (part.to(wide) - out.to(wide))).sum(-1)
        grad_out = (grad_out.to(wide) * share[..., None].to(wide)).to(part.dtype)
    return grad_out, share * grad_lse


def partial_gradients(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    given: Sequence[Tensor | None],  # the gradients of out, lse and weights
    tensors: Sequence[Tensor | None],  # of the forward: query, key, value, ...
    out: Tensor,  # [B, Hq, Lq, Dv] of all keys
    lse: Tensor,  # [B, Hq, Lq] of all keys
    options: AttentionBackwardOptions,
) -> Any:
    """Run ``backward``, a kernel that needs ``out`` and ``lse`` of exactly its keys."""
    grad_out, grad_lse, grad_weights = given
    assert grad_weights is None
    options = replace(options, partial=False, weights=0)
    part, lse_of_part, _ = forward(*tensors, options=options)
    # If lse is inf, other keys have all the weight, so w is 0.
    passed = gradients_of_part(grad_out, grad_lse, part, lse_of_part, out, lse)
    seen = (*tensors[:6], part, lse_of_part, *tensors[6:])
    return backward(*passed, None, *seen, options=options)
