"""The gradients of some of the keys, for backends whose kernels take rows of their own keys alone.

The results of all keys are those of these keys merged with those of the others. So the gradients of
out_s and lse_s, the results of these keys, are

    dout_s = w dout,  dlse_s = w (dlse + sum(dout (out_s - out))),  w = exp(lse_s - lse)

which is the backward pass of ``merge_states``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions

__all__ = ["partial_gradients"]


def partial_gradients(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    given: Sequence[Tensor | None],  # the gradients of out, lse and weights
    tensors: Sequence[Tensor | None],  # of the forward: query, key, value, ...
    out: Tensor,  # [B, Hq, Lq, Dv] of all keys
    lse: Tensor,  # [B, Hq, Lq] of all keys
    options: AttentionBackwardOptions,
) -> Any:
    """Return what ``backward`` returns, where ``out`` and ``lse`` are those of more keys."""
    grad_out, grad_lse, grad_weights = given
    assert grad_weights is None
    options = replace(options, partial=False, weights=0)
    part, lse_of_part, _ = forward(*tensors, options=options)
    # inf has all the weight, and none of it is of these keys.
    share = torch.where(lse_of_part == -torch.inf, 0.0, (lse_of_part - lse).exp())
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    if grad_out is not None:
        wide = torch.promote_types(grad_out.dtype, torch.float32)
        grad_lse = grad_lse + (grad_out.to(wide) * (part.to(wide) - out.to(wide))).sum(3)
        grad_out = (grad_out.to(wide) * share[..., None].to(wide)).to(grad_out.dtype)
    passed = (grad_out, share * grad_lse, None)
    return backward(*passed, *tensors[:6], part, lse_of_part, *tensors[6:], options=options)
