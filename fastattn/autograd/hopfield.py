"""Hopfield retrieval as an operator: saved tensors, derivative, batching rule, fake kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._flops import attention_flops, values
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions, extended
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.library import Operator

__all__ = ["hopfield_backward", "hopfield_states"]

_TENSORS = "Tensor state, Tensor stored, Tensor? keys, Tensor? mask, Tensor? bias"
_SHAPES = "state: G Q D; stored: G N D; keys: G N D; mask: G|1 Q|1 N|1; bias: G|1 Q|1 N|1"
_DIFFERENTIABLE = (0, 1, 2, 4)  # state, stored, keys, bias


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, ...]) -> None:
    _, taken, ends = results
    ctx.mark_non_differentiable(taken, ends)
    # Intermediate states are not saved: backward recomputes the steps.
    *tensors, ctx.options, ctx.backend = args
    ctx.save_for_backward(*tensors, taken, ends)


def _backward(
    ctx: Any, grad_out: Tensor | None, _taken: None, _ends: None
) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if grad_out is None:
        return tuple(gradients)
    wanted = [ctx.needs_input_grad[n] for n in _DIFFERENTIABLE]
    needed = sum(1 << n for n, want in enumerate(wanted) if want)
    options = extended(HopfieldBackwardOptions, ctx.options, needed=needed)
    seen = (*ctx.saved_tensors, options, ctx.backend)
    found = hopfield_backward.resume(ctx, (grad_out,), seen)
    for n, want, grad in zip(_DIFFERENTIABLE, wanted, found, strict=True):
        gradients[n] = grad if want else None
    return tuple(gradients)


def _fake(state: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *lead, width = state.shape
    return (
        state.new_empty(state.shape),
        state.new_empty(lead, dtype=torch.int64),
        state.new_empty((*lead, 2, width), dtype=torch.promote_types(state.dtype, torch.float32)),
    )


def _fake_backward(
    grad_out: Tensor,
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    needed = rest[-1].needed
    return tuple(
        x.new_empty(x.shape)
        if x is not None and (n == 0 or needed >> n & 1)
        else state.new_empty(0)
        for n, x in enumerate((state, stored, keys, bias))
    )


def _vmap(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the heads."""
    n = info.batch_size
    *tensors, options, backend = args
    heads = size_of_batch(tensors[0], in_dims[0])
    folded = [_expanded(x, dim, n, heads) for x, dim in zip(tensors, in_dims, strict=True)]
    results = hopfield_states.dispatched(*folded, options, backend)
    return tuple(unfold(x, n) for x in results), (0, 0, 0)


def _expanded(x: Tensor | None, dim: int | None, n: int, heads: int) -> Tensor | None:
    """As ``fold``; every example gets its own state and stored patterns."""
    folded = fold(x, dim, n, heads)
    if folded is None or folded.shape[0] == n * heads:
        return folded
    return folded.expand(n * heads, *folded.shape[1:])


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Loop over the examples: tensors shared by the heads have one gradient per example."""
    return one_by_one(hopfield_backward, info.batch_size, in_dims, args)


def _work(state: Tensor, stored: Tensor, taken: Tensor, options: HopfieldOptions) -> int:
    """The products of a state and a stored pattern in all steps, in elements."""
    steps = values(taken.flatten())
    if steps is not None:
        total = sum(map(abs, steps))
    else:  # all that are allowed; the first one if there is no limit
        total = taken.numel() * (options.steps_max if options.steps_max >= 0 else 1)
    return total * stored.shape[1] * stored.shape[2]


def _flops(results: Sequence[Tensor], state: Tensor, stored: Tensor, *rest: Any) -> int:
    return attention_flops(_work(state, stored, results[1], rest[-1]), 1, 1)


def _flops_backward(_: Any, grad_out: Any, state: Tensor, stored: Tensor, *rest: Any) -> int:
    *_keys_mask_and_bias, taken, _ends, options = rest
    return attention_flops(_work(state, stored, taken, options), 1, 1, backward=True)


hopfield_states = Operator(
    f"hopfield_retrieve({_TENSORS})",
    options=HopfieldOptions,
    returns=3,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    not_in_onnx={"state": "the number of steps depends on values"},
)

hopfield_backward = Operator(
    f"hopfield_retrieve_backward(Tensor grad_out, {_TENSORS}, Tensor taken, Tensor ends)",
    options=HopfieldBackwardOptions,
    returns=4,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; grad_out: G Q D; taken: G Q; ends: G Q 2 D",
    recomputed=("taken", "ends"),
)
