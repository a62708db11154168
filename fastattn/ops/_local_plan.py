"""The plan of Luong attention in local windows, see :mod:`fastattn.call`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn.autograd.local_attention import local_attention, local_attention_backward
from fastattn.backends.primitives import LocalOptions
from fastattn.call import Plans, may_plan
from fastattn.eager import runs_eagerly

__all__ = ["find", "keep"]

_plans = Plans()


def find(
    tensors: tuple[Any, ...],  # query, key, value, weight, positions, padding
    *options: Any,
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan():
        return None, None
    signature = _plans.sign(tensors, 0, (dispatch.forced.get(), *options))
    return signature, _plans.get(signature)


def keep(
    signature: bytes,
    tensors: tuple[Any, ...],
    call: tuple[Any, ...],
    dropout_p: float,
    returns_weights: bool,
) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    if local_attention.choose(call) == "cpu":
        requires_grad = compat.any_requires_grad(*tensors)
        _plans.keep(signature, Plan(call[-1], dropout_p, requires_grad, returns_weights))


class Plan:
    """How the calls of one signature run.

    The caller projects the query, converts the positions and draws the factor of dropout.
    """

    __slots__ = ("core", "dropout_p", "options", "requires_grad", "returns_weights")

    def __init__(
        self, options: LocalOptions, dropout_p: float, requires_grad: bool, returns_weights: bool
    ) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options, self.dropout_p = options, dropout_p
        self.requires_grad, self.returns_weights = requires_grad, returns_weights

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        factor: Tensor | None,
    ) -> Any:
        """(out, weights); no weights if they are not returned."""
        tensors = (query, key, value, positions, padding, factor)
        if self.requires_grad and torch.is_grad_enabled():
            results = _attend(*tensors, self)
            return results if self.returns_weights else (results, None)
        return self.core.local_attention(self.options, *tensors)


class PlannedLocalAttention(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        factor: Tensor | None,
        plan: Plan,
    ) -> Any:
        tensors = (query, key, value, positions, padding, factor)
        out, weights = plan.core.local_attention(plan.options, *tensors)
        ctx.save_for_backward(*tensors, weights)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.eager = plan.options, True
        return (out, weights) if plan.returns_weights else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        grads, tensors = (grad_out, grad_weights), ctx.saved_tensors
        if not torch.is_grad_enabled() and runs_eagerly(*grads):
            native: Any = dispatch.load("cpu")
            results = native.local_attention_backward(*grads, *tensors, options=ctx.options)
        else:
            seen = (*tensors, ctx.options, "cpu")
            results = local_attention_backward.resume(ctx, grads, seen)
        return *results, None, None, None


_attend = PlannedLocalAttention.apply
