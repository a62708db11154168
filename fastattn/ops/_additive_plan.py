"""The plan of additive attention, see :mod:`fastattn.call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._seed import draw_seed
from fastattn.autograd.additive import additive, additive_backward
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions, extended
from fastattn.call import Plans, may_plan
from fastattn.eager import runs_eagerly

__all__ = ["combined", "find", "keep"]

_plans = Plans()


def find(tensors: tuple[Any, ...], *options: Any) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none.

    The tensors are query, key, value, v, bias, attn_mask and key_padding_mask.
    """
    if not may_plan():
        return None, None
    signature = _plans.sign(tensors, 0, (dispatch.forced.get(), *options))
    return signature, _plans.get(signature)


def keep(signature: bytes, tensors: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    *inputs, _, _, options = call
    if any(x is not tensor for x, tensor in zip(inputs, tensors, strict=False)):
        return
    if additive.choose(call) == "cpu":
        requires_grad = compat.any_requires_grad(*tensors)
        _plans.keep(signature, Plan(options, requires_grad))


def combined(attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The mask [B|1, Tq|1, Tk|1] of both: True or finite takes part. ``padding`` is [B, Tk]."""
    if padding is not None:
        padding = padding[:, None]
    if attn_mask is None:
        return None if padding is None else ~padding
    if attn_mask.dim() < 3:
        attn_mask = attn_mask[(None,) * (3 - attn_mask.dim())]
    if padding is None:
        return attn_mask
    if attn_mask.dtype == torch.bool:
        return attn_mask & ~padding
    return torch.where(padding, float("-inf"), attn_mask)


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("core", "options", "requires_grad")

    def __init__(self, options: AdditiveOptions, requires_grad: bool) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        # As the backward pass takes them, so that it need not convert them.
        self.options = extended(AdditiveBackwardOptions, options)
        self.requires_grad = requires_grad

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        v: Tensor,
        bias: Tensor | None,
        attn_mask: Tensor | None,
        padding: Tensor | None,
    ) -> Any:
        """The results of the public function."""
        options = self.options
        mask = combined(attn_mask, padding)
        seed = draw_seed(query.device) if options.dropout_p else None
        if self.requires_grad and torch.is_grad_enabled():
            return _attend(query, key, value, v, bias, mask, seed, self)
        results = self.core.additive_attention(options, query, key, value, v, bias, mask, seed)
        return results if options.weights else results[0]


class PlannedAdditiveAttention(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        plan: Plan,
    ) -> Any:
        tensors = (query, key, value, v, bias, mask, seed)
        results = plan.core.additive_attention(plan.options, *tensors)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.eager = plan.options, True
        return results if plan.options.weights else results[0]

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        *_, of_bias, of_mask, _, _ = ctx.needs_input_grad
        options = replace(ctx.options, needs_mask_grad=True) if of_mask else ctx.options
        grads, tensors = (grad_out, grad_weights), ctx.saved_tensors
        if not torch.is_grad_enabled() and runs_eagerly(*grads):
            native: Any = dispatch.load("cpu")
            results = native.additive_attention_backward(*grads, *tensors, options=options)
        else:
            results = additive_backward.resume(ctx, grads, (*tensors, options, "cpu"))
        *others, grad_bias, grad_mask = results
        return (
            *others,
            grad_bias if of_bias else None,
            grad_mask if of_mask else None,
            None,
            None,
        )


_attend = PlannedAdditiveAttention.apply
