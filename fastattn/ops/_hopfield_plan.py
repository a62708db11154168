"""The plan of Hopfield retrieval, see :mod:`fastattn.call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._seed import draw_seed
from fastattn.autograd.hopfield import hopfield_backward, hopfield_states
from fastattn.autograd.sdpa import attention, attention_backward
from fastattn.backends.primitives import (
    AttentionBackwardOptions,
    AttentionOptions,
    HopfieldBackwardOptions,
    HopfieldOptions,
    extended,
)
from fastattn.call import only_viewed
from fastattn.eager import runs_eagerly

__all__ = ["by_kind", "lifted", "lowered", "of_groups", "plan_of"]

_FEW_STEPS = 4  # whose states are kept, so that the backward pass need not take them again
_MOST_LENGTHS = 64


def plan_of(
    tensors: tuple[Any, ...],
    steps: tuple[Any, ...],  # the arguments of the operator of the steps
    reading: tuple[Any, ...],  # those of the attention that reads the patterns at the end
    needs_steps: bool,
) -> Plan | None:
    """The plan of a call that the complete path prepared.

    A call whose patterns are cast, scaled or shared by the batch has none. Neither has one whose
    mask requires a gradient.
    """
    state, stored, projection, mask = tensors
    options: HopfieldOptions = steps[-1]
    query, key, value, read_mask, *_, reads = reading
    values = stored if projection is None else projection
    if not only_viewed((query, key, value, read_mask), (state, stored, values, mask)):
        return None
    if options.crowded or _is_shared(stored) or (mask is not None and mask.requires_grad):
        return None
    if dispatch.asks_torch_first(attention.name, state.dtype):
        return None
    if not hopfield_states.choose(steps) == "cpu" == attention.choose(reading):
        return None
    requires_grad = compat.any_requires_grad(*tensors)
    return Plan(options, reads, options.together > 1, requires_grad, needs_steps)


class Plan:
    """How the calls of one signature run."""

    __slots__ = (
        "core",
        "keeps",
        "lengths",
        "needs_steps",
        "options",
        "reading",
        "requires_grad",
        "returns_more",
    )

    def __init__(
        self,
        options: HopfieldOptions,
        reading: AttentionOptions,
        by_head: bool,
        requires_grad: bool,
        needs_steps: bool,
    ) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options = options
        # As the backward pass takes them, so that it need not convert them.
        self.reading = extended(AttentionBackwardOptions, reading, needs_mask_grad=False)
        # The options for each number of queries that stop together.
        self.lengths: dict[int, HopfieldOptions] | None = {} if by_head else None
        unrolls = options.grad == "unroll" and options.together == 1
        self.keeps = unrolls and 0 < options.steps_max <= _FEW_STEPS
        self.requires_grad, self.needs_steps = requires_grad, needs_steps
        self.returns_more = needs_steps or reading.weights != 0

    def run(
        self, state: Tensor, stored: Tensor, projection: Tensor | None, mask: Tensor | None
    ) -> Any:
        """The results of the public function; None if the batch shares its patterns."""
        if _is_shared(stored):
            return None
        rank = state.dim()
        if rank < 4:
            state, stored = lifted(state), lifted(stored)
            projection = None if projection is None else lifted(projection)
        if mask is not None:
            mask = lifted(mask[(None,) * (rank - mask.dim())])
        options = self.options
        if self.lengths is not None:
            options = self._of_length(state.shape[2])
        seed = draw_seed(state.device) if self.reading.dropout_p else None
        results: Any
        if self.requires_grad and torch.is_grad_enabled():
            results = _retrieve(state, stored, projection, mask, seed, options, self)
            if not self.returns_more:
                return results if rank == 4 else lowered(results, rank)
        else:
            xi, taken, *_ = self.core.hopfield_retrieve(
                options, state, stored, None, *_of_steps(mask, state), False
            )
            out, _, weights = self.read(xi, stored, projection, mask, seed, False)
            if not self.returns_more:
                return out if rank == 4 else lowered(out, rank)
            results = out, weights, taken
        out, weights, taken = results
        extras = (weights, taken.abs() if self.needs_steps else None)
        return tuple(lowered(x, rank) for x in (out, *extras) if x is not None)

    def read(
        self,
        xi: Tensor,
        stored: Tensor,
        projection: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        needs_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The attention of the final states: out, lse, weights."""
        value = stored if projection is None else projection
        biases = (mask, None, seed, None, None, None, None)
        found: Any = self.core.attention(self.reading, xi, stored, value, *biases, needs_lse)
        return found

    def _of_length(self, queries: int) -> HopfieldOptions:
        assert self.lengths is not None
        options = self.lengths.get(queries)
        if options is None:
            if len(self.lengths) >= _MOST_LENGTHS:
                self.lengths.clear()
            options = self.lengths[queries] = replace(self.options, together=queries)
        return options


class PlannedRetrieval(compat.SingleLevelFunction):
    """The calls of plans, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        stored: Tensor,
        projection: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        options: HopfieldOptions,
        plan: Plan,
    ) -> Any:
        xi, taken, states, stats = plan.core.hopfield_retrieve(
            options, state, stored, None, *_of_steps(mask, state), plan.keeps
        )
        out, lse, weights = plan.read(xi, stored, projection, mask, seed, True)
        ctx.save_for_backward(
            state, stored, projection, mask, seed, out, lse, xi, taken, states, stats
        )
        ctx.set_materialize_grads(False)
        ctx.options, ctx.plan, ctx.eager = options, plan, True
        if not plan.returns_more:
            return out
        ctx.mark_non_differentiable(taken)
        return out, weights, taken

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None = None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        of_state, of_stored, of_projection, *_others = ctx.needs_input_grad
        if grad_out is None and grad_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        derive = _resumed
        if not torch.is_grad_enabled() and runs_eagerly(grad_out, grad_weights):
            derive = _derived
        grads = derive(ctx, grad_out, grad_weights, of_state + 2 * of_stored)
        return (
            grads[0] if of_state else None,
            grads[1] if of_stored else None,
            grads[2] if of_projection else None,
            None,
            None,
            None,
            None,
        )


_retrieve = PlannedRetrieval.apply
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _derived(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, needed: int
) -> _Gradients:
    """The gradients of state, stored and projection, from the kernels."""
    state, stored, projection, mask, seed, out, lse, xi, taken, states, stats = ctx.saved_tensors
    core, options = ctx.plan.core, ctx.options
    value = stored if projection is None else projection
    grad_xi, grad_stored, grad_value, *_ = core.attention_backward(
        ctx.plan.reading,
        *(grad_out, None, grad_weights),
        *(xi, stored, value, mask, None, seed, out, lse, None, None, None, None),
    )
    if projection is None:
        grad_stored += grad_value
    if not needed:
        return None, grad_stored, grad_value
    biases = _of_steps(mask, state)
    if stats is not None:
        steps = (state, stored, None, *biases, taken, states, stats)
        grad_state, of_steps, *_ = core.hopfield_backward(options, grad_xi, *steps, needed)
    else:
        native: Any = dispatch.load("cpu")
        groups = (x.flatten(0, 1) for x in (grad_xi, state, stored))
        grad_state, of_steps, *_ = native.hopfield_retrieve_backward(
            *(*groups, None, *biases, taken.flatten(0, 1), states),
            options=extended(HopfieldBackwardOptions, options, needed=needed),
        )
        grad_state = grad_state.view_as(state)
    if of_steps is not None:
        grad_stored += of_steps.view_as(stored)
    return grad_state, grad_stored, grad_value


def _resumed(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, needed: int
) -> _Gradients:
    """The same by the operators; the steps are taken again, so that they are differentiated."""
    state, stored, projection, mask, seed, out, lse, *_steps = ctx.saved_tensors
    value = stored if projection is None else projection
    start = (state.flatten(0, 1), stored.flatten(0, 1), None, *_of_steps(mask, state))
    xi, taken, ends = hopfield_states(*start, ctx.options)
    grads = (grad_out, None, grad_weights)
    tensors = attention_backward.tensors(
        query=xi.reshape(state.shape),
        key=stored,
        value=value,
        attn_mask=mask,
        seed=seed,
        out=out,
        lse=lse,
    )[len(grads) :]
    grad_xi, grad_stored, grad_value, *_ = attention_backward.resume(
        ctx, grads, (*tensors, ctx.plan.reading, "cpu")
    )
    if projection is None:
        grad_stored = grad_stored + grad_value
    if not needed:
        return None, grad_stored, grad_value
    options = extended(HopfieldBackwardOptions, ctx.options, needed=needed)
    seen = (*start, taken, ends, options, "cpu")
    grad_xi = grad_xi.reshape(start[0].shape)  # the older vmap of PyTorch has no flatten()
    grad_state, of_steps, *_ = hopfield_backward.resume(ctx, (grad_xi,), seen)
    if needed & 2:
        grad_stored = grad_stored + of_steps.reshape(stored.shape)
    return grad_state.reshape(state.shape), grad_stored, grad_value


# -- the dimensions of a call, for the complete path too -------------------------------------------


def lifted(x: Tensor) -> Tensor:
    """[L, D], [B, L, D] or [B, H, L, D] -> [B, H, L, D]."""
    if x.ndim == 4:
        return x
    return x.unsqueeze(1) if x.ndim == 3 else x[(None,) * (4 - x.ndim)]


def lowered(x: Tensor, rank: int) -> Tensor:
    if rank == 4:
        return x
    return x[:, 0] if rank == 3 else x[0, 0]


def of_groups(mask: Tensor, state: Tensor) -> Tensor:
    """A mask [B|1, H|1, L|1, N|1] of a state [B, H, L, D] as [B H|1, L|1, N|1]."""
    if mask.shape[0] == mask.shape[1] == 1:
        return mask[0]
    return mask.expand(*state.shape[:2], -1, -1).flatten(0, 1)


def by_kind(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The mask and the bias of the operator: one of them is None."""
    return (mask, None) if mask is None or mask.dtype is torch.bool else (None, mask)


def _of_steps(mask: Tensor | None, state: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if mask is None else by_kind(of_groups(mask, state))


def _is_shared(stored: Tensor) -> bool:
    return stored.stride()[0] == 0 and stored.shape[0] > 1
