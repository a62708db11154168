"""The plan of attention, see :mod:`fastattn.call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch, masks
from fastattn._seed import draw_seed
from fastattn.autograd.sdpa import attention, attention_backward
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions, extended
from fastattn.call import Plans, may_plan, only_viewed
from fastattn.eager import runs_eagerly

__all__ = ["find", "keep"]

_plans = Plans()
_ROWS = 3  # query, key and value: their heads and columns are in the signature
_MOST_OFFSETS = 64


def find(
    tensors: tuple[Any, ...],  # query, key, value, attn_mask, alibi_slopes, sinks
    mask: Any,
    *options: Any,  # the others, in the order of the public function
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan():
        return None, None
    signature = _plans.sign(tensors, _ROWS, (dispatch.forced.get(), mask is None, options))
    return signature, _plans.get(signature)


def keep(
    signature: bytes,
    tensors: tuple[Any, ...],
    call: tuple[Any, ...],
    bottom_right: bool = False,
    returns_lse: bool = False,
    returns_weights: bool = False,
) -> Plan | None:
    """Keep and return the plan of a call that the complete path prepared: tensors became ``call``.

    A call whose tensors were changed by more than a view has none: a cast, folded or repeated
    dimensions. Neither has one that the reference serves.
    """
    query, key, value, mask, slopes, _, sinks, *_, options = call
    if query is not tensors[0] or key is not tensors[1] or value is not tensors[2]:
        return None
    if not only_viewed((mask, slopes, sinks), tensors[3:]):
        return None
    if slopes is not None and slopes.requires_grad:
        return None
    backend = attention.choose(call)
    if dispatch.asks_torch_first(attention.name, query.dtype):
        backend = ""
    elif backend != "cpu":
        return None
    requires_grad = compat.any_requires_grad(*tensors)
    plan = Plan(options, backend, bottom_right, requires_grad, returns_lse, returns_weights)
    _plans.keep(signature, plan)
    return plan


class Plan:
    """How the calls of one signature run: with which options, on which backend."""

    __slots__ = (
        "backend",
        "core",
        "offsets",
        "options",
        "record",
        "requires_grad",
        "returns_lse",
        "returns_more",
        "returns_weights",
    )

    def __init__(
        self,
        options: AttentionOptions,
        backend: str,  # "": each call chooses, because the answer depends on values
        bottom_right: bool,
        requires_grad: bool,
        returns_lse: bool,
        returns_weights: bool,
    ) -> None:
        self.core: Any = _core() if backend else None
        # As the backward pass takes them, so that it need not convert them; and as the core does.
        self.options = extended(AttentionBackwardOptions, options)
        self.record: Any = self.core and self.core.AttentionOptions(self.options)
        self.backend = backend
        # Both at each distance of the last query from the last key.
        self.offsets: dict[int, tuple[Any, Any]] | None = {} if bottom_right else None
        self.requires_grad = requires_grad
        self.returns_lse, self.returns_weights = returns_lse, returns_weights
        self.returns_more = returns_lse or returns_weights

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        mask: Any,  # of fastattn.masks
    ) -> Any:
        """The results of the public function."""
        options, record = self.options, self.record
        if self.offsets is not None:
            options, record = self._with_offset(key.shape[2] - query.shape[2])
        program = seed = None
        if mask is not None:
            program = masks.program(attention.name, mask, query, key.shape[2], options.offset)
        if options.dropout_p:
            seed = draw_seed(query.device)
        results: Any
        if not self.backend:
            biases = (attn_mask, alibi_slopes, seed, sinks, None, None, program)
            results = attention(query, key, value, *_as_operator_takes(*biases), options)
        elif self.requires_grad and torch.is_grad_enabled():
            if attn_mask is not None and attn_mask.requires_grad:
                attn_mask = _of_four_dimensions(attn_mask)
            constants = (alibi_slopes, seed, program)
            both = (options, record)
            results = _attend(query, key, value, attn_mask, sinks, constants, both, self)
            if not self.returns_more:
                return results
        else:
            results = self.core.attention(
                record,
                query,
                key,
                value,
                attn_mask,
                alibi_slopes,
                seed,
                sinks,
                None,
                None,
                program,
                self.returns_lse,
            )
        if not self.returns_more:
            return results[0]
        out, lse, weights = results
        if not self.returns_lse:
            return out, weights
        lse = lse if query.dtype is torch.float64 else lse.float()
        return (out, lse, weights) if self.returns_weights else (out, lse)

    def _with_offset(self, offset: int) -> tuple[Any, Any]:
        assert self.offsets is not None
        both = self.offsets.get(offset)
        if both is None:
            if len(self.offsets) >= _MOST_OFFSETS:
                self.offsets.clear()
            options = replace(self.options, offset=offset)
            record = self.core and self.core.AttentionOptions(options)
            both = self.offsets[offset] = options, record
        return both


class PlannedAttention(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        constants: tuple[Tensor | None, ...],
        options: tuple[AttentionBackwardOptions, Any],  # and the core's record of them
        plan: Plan,
    ) -> Any:
        slopes, seed, program = constants
        out, lse, weights = plan.core.attention(
            options[1], query, key, value, attn_mask, slopes, seed, sinks, None, None, program, True
        )
        ctx.save_for_backward(query, key, value, attn_mask, slopes, seed, out, lse, sinks, program)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.core, ctx.eager = options, plan.core, True
        return (out, lse, weights) if plan.returns_more else out

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None = None,
        grad_weights: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        of_query, of_key, of_value, of_mask, of_sinks, *_ = ctx.needs_input_grad
        if grad_out is None and grad_lse is None and grad_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        options, record = ctx.options
        if of_mask:
            options = replace(options, needs_mask_grad=True)
        query, key, value, mask, slopes, seed, out, lse, sinks, program = ctx.saved_tensors
        grads = (grad_out, grad_lse, grad_weights)
        if not torch.is_grad_enabled() and runs_eagerly(*grads):
            if of_mask:
                record = ctx.core.AttentionOptions(options)
            found = ctx.core.attention_backward(
                record,
                grad_out,
                grad_lse,
                grad_weights,
                query,
                key,
                value,
                mask,
                slopes,
                seed,
                out,
                lse,
                sinks,
                None,
                None,
                program,
            )
        else:
            biases = _as_operator_takes(mask, slopes, seed, sinks, None, None, program)
            tensors = (query, key, value, *biases[:3], out, lse, *biases[3:])
            found = attention_backward.resume(ctx, grads, (*tensors, options, "cpu"))
        grad_query, grad_key, grad_value, grad_mask, grad_sinks, _ = found
        if of_mask:
            grad_mask = grad_mask.to(mask.dtype)  # one element may sum those of many rows
        if of_sinks and grad_sinks.dim() == 2:
            grad_sinks = grad_sinks[0]
        return (
            grad_query if of_query else None,
            grad_key if of_key else None,
            grad_value if of_value else None,
            grad_mask if of_mask else None,
            grad_sinks if of_sinks else None,
            None,
            None,
            None,
        )


_attend = PlannedAttention.apply


def _core() -> Any:
    backend: Any = dispatch.load("cpu")
    return backend._cpu


def _of_four_dimensions(mask: Tensor) -> Tensor:
    return mask.view((1,) * (4 - mask.dim()) + mask.shape)


def _as_operator_takes(
    mask: Tensor | None,
    slopes: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    *others: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The biases of a call in the ranks of the operator's schema."""
    if mask is not None:
        mask = _of_four_dimensions(mask)
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes[None]
    return mask, slopes, seed, sinks if sinks is None else sinks[None], *others
