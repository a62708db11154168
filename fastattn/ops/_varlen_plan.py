"""The plan of attention over packed sequences, see :mod:`fastattn.call`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._seed import draw_seed
from fastattn.autograd.varlen import packed_attention, packed_attention_backward
from fastattn.backends.primitives import VarlenOptions
from fastattn.call import Plans, may_plan, only_viewed
from fastattn.eager import runs_eagerly

__all__ = ["find", "keep"]

_plans = Plans()
_ROWS = 3  # query, key and value: their heads and columns are in the signature
_LENGTHS = (int, type(None))  # the types of a max_seqlen that the native function takes


def find(
    tensors: tuple[Any, ...],  # query, key, value, both cu_seqlens, alibi_slopes, sinks
    longest: tuple[Any, Any],  # max_seqlen of queries and keys: their values are checked each time
    *options: Any,
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan() or type(longest[0]) not in _LENGTHS or type(longest[1]) not in _LENGTHS:
        return None, None
    signature = _plans.sign(tensors, _ROWS, (dispatch.forced.get(), *options))
    return signature, _plans.get(signature)


def keep(
    signature: bytes, tensors: tuple[Any, ...], call: tuple[Any, ...], returns_lse: bool
) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    query, key, value, _, _, slopes, _, sinks, *_, options = call
    if query is not tensors[0] or key is not tensors[1] or value is not tensors[2]:
        return
    if not only_viewed((slopes, sinks), tensors[5:]):
        return
    if slopes is not None and slopes.requires_grad:
        return
    if packed_attention.choose(call) == "cpu":
        requires_grad = compat.any_requires_grad(*tensors)
        _plans.keep(signature, Plan(options, requires_grad, returns_lse))


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("core", "options", "requires_grad", "returns_lse")

    def __init__(self, options: VarlenOptions, requires_grad: bool, returns_lse: bool) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options, self.requires_grad, self.returns_lse = options, requires_grad, returns_lse

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_starts: Tensor,
        k_starts: Tensor,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        longest: tuple[int | None, int | None],
    ) -> Any:
        """The results of the public function; None if a value is wrong, which it then names."""
        seed = draw_seed(query.device) if self.options.dropout_p else None
        constants = (q_starts, k_starts, alibi_slopes, seed)
        try:
            if self.requires_grad and torch.is_grad_enabled():
                results = _attend(query, key, value, sinks, constants, longest, self)
                if not self.returns_lse:
                    return results
            else:
                results = self.core.varlen_attention(
                    self.options, query, key, value, *constants, sinks, None, None, *longest
                )
        except ValueError:
            return None
        out, lse = results
        if not self.returns_lse:
            return out
        return out, lse if query.dtype is torch.float64 else lse.float()


class PlannedVarlenAttention(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        constants: tuple[Tensor | None, ...],
        longest: tuple[int | None, int | None],
        plan: Plan,
    ) -> Any:
        out, lse = plan.core.varlen_attention(
            plan.options, query, key, value, *constants, sinks, None, None, *longest
        )
        ctx.save_for_backward(query, key, value, *constants, out, lse, sinks)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.eager = plan.options, True
        return (out, lse) if plan.returns_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        of_query, of_key, of_value, of_sinks, *_ = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        query, key, value, q_starts, k_starts, slopes, seed, out, lse, sinks = ctx.saved_tensors
        if not torch.is_grad_enabled() and runs_eagerly(grad_out, grad_lse):
            native: Any = dispatch.load("cpu")
            grads = native.varlen_attention_backward(
                grad_out,
                grad_lse,
                *(query, key, value, q_starts, k_starts, slopes, seed, out, lse, sinks),
                options=ctx.options,
            )
        else:
            starts = (q_starts.to(torch.int64), k_starts.to(torch.int64))
            if slopes is not None and slopes.dim() == 1:
                slopes = slopes[None]
            rows = sinks if sinks is None else sinks[None]
            tensors = (query, key, value, *starts, slopes, seed, out, lse, rows, None, None)
            grads = packed_attention_backward.resume(
                ctx, (grad_out, grad_lse), (*tensors, ctx.options, "cpu")
            )
        grad_query, grad_key, grad_value, grad_sinks, _ = grads
        if of_sinks and grad_sinks.dim() == 2:
            grad_sinks = grad_sinks[0]
        return (
            grad_query if of_query else None,
            grad_key if of_key else None,
            grad_value if of_value else None,
            grad_sinks if of_sinks else None,
            None,
            None,
            None,
        )


_attend = PlannedVarlenAttention.apply
