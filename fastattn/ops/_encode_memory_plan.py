"""The plan of memory encoding, see :mod:`fastattn.call`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn.autograd.encode_memory import encode, encode_backward
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.call import Plans, may_plan, only_viewed
from fastattn.eager import runs_eagerly

__all__ = ["find", "keep"]

_plans = Plans()


def find(
    tensors: tuple[Any, ...],  # tokens, weight, temporal
    *options: Any,
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan():
        return None, None
    signature = _plans.sign(tensors, 0, (dispatch.forced.get(), *options))
    return signature, _plans.get(signature)


def keep(signature: bytes, tensors: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    tokens, weight, _, temporal, options = call
    if not only_viewed((tokens, weight, temporal), tensors):
        return
    if encode.choose(call) == "cpu":
        requires_grad = compat.any_requires_grad(*tensors)
        _plans.keep(signature, Plan(options, requires_grad))


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("core", "options", "requires_grad")

    def __init__(self, options: EncodeMemoryOptions, requires_grad: bool) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options, self.requires_grad = options, requires_grad

    def run(
        self, tokens: Tensor, weight: Tensor, temporal: Tensor | None, factors: Tensor
    ) -> Tensor:
        """The result of the public function."""
        if self.requires_grad and torch.is_grad_enabled():
            return _encode(weight, temporal, tokens, factors, self)
        memory: Tensor = self.core.encode_memory(self.options, tokens, weight, factors, temporal)
        return memory


class PlannedEncoding(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        temporal: Tensor | None,
        tokens: Tensor,
        factors: Tensor,
        plan: Plan,
    ) -> Tensor:
        ctx.save_for_backward(tokens, factors)
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.padding_idx, ctx.eager = weight.shape[-2], plan.options.padding_idx, True
        memory: Tensor = plan.core.encode_memory(plan.options, tokens, weight, factors, temporal)
        return memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        of_weight, of_temporal, *_ = ctx.needs_input_grad
        tokens, factors = ctx.saved_tensors
        options = EncodeMemoryBackwardOptions(ctx.rows, of_temporal, ctx.padding_idx)
        if not torch.is_grad_enabled() and runs_eagerly(grad):
            native: Any = dispatch.load("cpu")
            found = native.encode_memory_backward(grad, tokens, factors, options=options)
        else:
            one_table = grad.dim() == 3
            models = (grad[:, None] if one_table else grad)[None]
            call = (tokens[None], factors, options, "cpu")
            found = encode_backward.resume(ctx, (models,), call)
            # Without a temporal table its gradient has no dimensions to drop.
            needed = zip(found, (True, of_temporal), strict=True)
            found = [(x[0, 0] if one_table else x[0]) if wanted else None for x, wanted in needed]
        grad_weight, grad_temporal = found
        return (
            grad_weight if of_weight else None,
            grad_temporal if of_temporal else None,
            None,
            None,
            None,
        )


_encode = PlannedEncoding.apply
