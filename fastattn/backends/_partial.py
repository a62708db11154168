"""The gradients of a part of the keys, where ``out`` and ``lse`` are the results of all keys.

The results of all keys are the merge of the results of this part and of the other keys. So the
derivative goes through the merge first, and then through attention to this part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions

BackwardFunction = Callable[..., tuple[Tensor | None, ...]]


def gradients_of_part(
    grad_out: Tensor | None,  # [..., Dv]
    grad_lse: Tensor | None,  # [...]
    out_of_part: Tensor,  # out_s [..., Dv], of this part of the keys
    lse_of_part: Tensor,  # [...]
    out: Tensor,  # [..., Dv] of all keys
    lse: Tensor,  # [...]
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of out_s and lse_s, a state that was merged to ``out`` and ``lse``:

    dout_s = w dout,  dlse_s = w (dlse + sum(dout (out_s - out))),  w = exp(lse_s - lse)
    """
    share = torch.where(lse_of_part == -torch.inf, 0.0, (lse_of_part - lse).exp())
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    if grad_out is not None:
        wide = torch.promote_types(grad_out.dtype, torch.float32)
        grad_lse = grad_lse + (grad_out.to(wide) * (out_of_part.to(wide) - out.to(wide))).sum(-1)
        grad_out = (grad_out.to(wide) * share[..., None].to(wide)).to(out_of_part.dtype)
    return grad_out, share * grad_lse


def backward_of_part(forward: Callable[..., Any]) -> Callable[[BackwardFunction], BackwardFunction]:
    """Decorate a backward function of attention, so that it supports ``options.partial`` too.

    Its kernels need out and lse of the keys of the call, which ``forward`` computes.
    """

    def decorate(backward: BackwardFunction) -> BackwardFunction:
        @functools.wraps(backward)  # the dispatcher reads the names of its tensors
        def differentiate(
            *tensors: Tensor | None, options: AttentionBackwardOptions
        ) -> tuple[Tensor | None, ...]:
            """The backward function; for ``partial``, the derivative of the merge comes first."""
            if not options.partial:
                return backward(*tensors, options=options)
            grad_out, grad_lse, grad_weights, *inputs = tensors[:9]
            out, lse, *biases = tensors[9:]
            assert out is not None
            assert lse is not None
            assert grad_weights is None
            options = replace(options, partial=False, weights=0)
            out_of_part, lse_of_part, _ = forward(*inputs, *biases, options=options)
            # If lse is inf but lse_of_part is not, another key has all the weight, and w is 0.
            grads_of_part = gradients_of_part(
                grad_out, grad_lse, out_of_part, lse_of_part, out, lse
            )
            saved = (*inputs, out_of_part, lse_of_part, *biases)
            return backward(*grads_of_part, None, *saved, options=options)

        return differentiate

    return decorate
