"""The plan of memory hops, see :mod:`fastattn.call`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn.autograd.memory_hops import hop_attention, hop_attention_backward, share
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions, extended
from fastattn.call import Plans, may_plan, only_viewed
from fastattn.eager import runs_eagerly

__all__ = ["find", "keep"]

_plans = Plans()
# How the native function returns trace and stats.
_NO_STATES, _IN_ONE_ARRAY = 0, 2


def find(
    tensors: tuple[Any, ...],  # query, in_memory, out_memory, hop_proj, memory_mask, memory_bias
    options: tuple[Any, ...],
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan():
        return None, None
    signature = _plans.sign(tensors, 0, (dispatch.forced.get(), options))
    return signature, _plans.get(signature)


def keep(signature: bytes, tensors: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    *prepared, options = call
    if not only_viewed(prepared, tensors):
        return
    if hop_attention.choose(call) == "cpu":
        requires_grad = compat.any_requires_grad(*tensors)
        shares = prepared[1] is not tensors[1] or prepared[2] is not tensors[2]
        _plans.keep(signature, Plan(options, requires_grad, shares))


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("backward_options", "core", "options", "requires_grad", "shares")

    def __init__(self, options: MemoryHopOptions, requires_grad: bool, shares: bool) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options, self.requires_grad = options, requires_grad
        self.shares = shares  # whether a memory is expanded over its batch
        # Of a backward pass that computes the gradients of these arguments.
        self.backward_options: dict[tuple[bool, ...], MemoryHopBackwardOptions] = {}

    def run(
        self,
        query: Tensor,
        in_memory: Tensor,
        out_memory: Tensor | None,
        hop_proj: Tensor | None,
        memory_mask: Tensor | None,
        memory_bias: Tensor | None,
    ) -> Any:
        """The results of the public function; None if a size is wrong, which it then names."""
        try:
            if self.requires_grad and torch.is_grad_enabled():
                if self.shares:
                    in_memory = share(in_memory)
                    out_memory = None if out_memory is None else share(out_memory)
                if memory_bias is not None and memory_bias.requires_grad:
                    memory_bias = _of_four_dimensions(memory_bias, query)
                memories, mask = (in_memory, out_memory), memory_mask
                return _hop(query, *memories, hop_proj, memory_bias, mask, self)
            out, _, _, weights = self.core.memory_hops(
                self.options,
                query,
                in_memory,
                out_memory,
                hop_proj,
                memory_mask,
                memory_bias,
                _NO_STATES,
            )
        except ValueError:
            return None
        return (out, weights) if self.options.weights else out

    def options_of_backward(self, wanted: tuple[bool, ...]) -> MemoryHopBackwardOptions:
        options = self.backward_options.get(wanted)
        if options is None:
            needed = sum(1 << n for n in range(5) if wanted[n])
            options = extended(MemoryHopBackwardOptions, self.options, needed=needed)
            self.backward_options[wanted] = options
        return options


class PlannedMemoryHops(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        in_memory: Tensor,
        out_memory: Tensor | None,
        hop_proj: Tensor | None,
        memory_bias: Tensor | None,
        memory_mask: Tensor | None,
        plan: Plan,
    ) -> Any:
        tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
        out, kept, _, weights = plan.core.memory_hops(plan.options, *tensors, _IN_ONE_ARRAY)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, kept)  # as on the complete path, not the weights
        return (out, weights) if plan.options.weights else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        if grad_out is None and grad_weights is None:
            return (None,) * len(wanted)
        options = ctx.plan.options_of_backward(wanted)
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled() and runs_eagerly(grad_out, grad_weights):
            native: Any = dispatch.load("cpu")
            of_query, *grads = native.memory_hop_attention_backward(
                grad_out, grad_weights, *saved, None, options=options
            )
            return of_query if wanted[0] else None, *grads, None, None
        query, *memories, mask, bias, kept = saved
        of_hops = (_of_four_dimensions(x, query) for x in (mask, bias))
        states = _trace_and_stats(kept, query, options.hops)
        ctx.eager = True
        call = (query, *memories, *of_hops, *states, options, "cpu")
        found = hop_attention_backward.resume(ctx, (grad_out, grad_weights), call)
        grads = [grad if want else None for grad, want in zip(found, wanted, strict=False)]
        return *grads, None, None


_hop = PlannedMemoryHops.apply


def _trace_and_stats(kept: Tensor, query: Tensor, hops: int) -> tuple[Tensor, Tensor]:
    """The states [..., 2K + 1, D] and [..., K, 2] of the array that a plan keeps."""
    *lead, width = query.shape
    sizes = (*lead, 2 * hops + 1, width), (*lead, hops, 2)
    lengths = [math.prod(size) for size in sizes]
    trace, stats = kept[: sum(lengths)].split(lengths)
    return trace.view(sizes[0]), stats.view(sizes[1])


def _of_four_dimensions(x: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask or a bias as [B|1, Q|1, K|1, N|1]."""
    if x is None or x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(2 if query.dim() == 3 else 1)
    return x[:, None, None] if x.dim() == 2 else x[None, None, None]
