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

Gradients = Callable[..., tuple[Tensor | None, ...]]


def gradients_of_part(
    grad_out: Tensor | None,  # [..., Dv]
    grad_lse: Tensor | None,  # [...]
    out_of_part: Tensor,  # out_s [..., Dv], of this part of the keys
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
        grad_lse = grad_lse + (grad_out.to(wide) * (out_of_part.to(wide) - out.to(wide))).sum(-1)
        grad_out = (grad_out.to(wide) * share[..., None].to(wide)).to(out_of_part.dtype)
    return grad_out, share * grad_lse


def backward_of_part(forward: Callable[..., Any]) -> Callable[[Gradients], Gradients]:
    """Let a backward function of attention, whose kernels take rows of their own keys, serve
    ``partial`` too."""

    def of_part(backward: Gradients) -> Gradients:
        @functools.wraps(backward)  # so the dispatcher knows the tensors that it takes
        def differentiate(
            *tensors: Tensor | None, options: AttentionBackwardOptions
        ) -> tuple[Tensor | None, ...]:
            """The backward function, preceded by the derivative of the merge for ``partial``."""
            if not options.partial:
                return backward(*tensors, options=options)
            (grad_out, grad_lse, grad_weights), (out, lse) = tensors[:3], tensors[9:11]
            assert out is not None
            assert lse is not None
            assert grad_weights is None
            options = replace(options, partial=False, weights=0)
            inputs, biases = tensors[3:9], tensors[11:]
            out_of_part, lse_of_part, _ = forward(*inputs, *biases, options=options)
            # A whole lse of inf is that of other keys, so w is 0.
            grads_of_part = gradients_of_part(
                grad_out, grad_lse, out_of_part, lse_of_part, out, lse
            )
            saved = (*inputs, out_of_part, lse_of_part, *biases)
            return backward(*grads_of_part, None, *saved, options=options)

        return differentiate

    return of_part
