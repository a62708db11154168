"""Additive attention as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn._flops import additive_flops, visible_pairs
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions, extended
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.library import Operator

__all__ = ["additive", "additive_backward"]


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor]) -> None:
    # No result is saved: backward recomputes whole rows from the inputs.
    *tensors, ctx.options, ctx.backend = args
    ctx.save_for_backward(*tensors)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.options.weights:  # ignore the gradient of the empty placeholder
        grad_weights = None
    if grad_out is None and grad_weights is None:
        return (None,) * len(ctx.needs_input_grad)
    _, _, _, _, needs_bias_grad, needs_mask_grad, *others = ctx.needs_input_grad
    options = extended(AdditiveBackwardOptions, ctx.options, needs_mask_grad=needs_mask_grad)
    seen = (*ctx.saved_tensors, options, ctx.backend)
    *grads, grad_bias, grad_mask = additive_backward.resume(ctx, (grad_out, grad_weights), seen)
    return (
        *grads,
        grad_bias if needs_bias_grad else None,
        grad_mask if needs_mask_grad else None,
        *(None for _ in others),
    )


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, queries, _ = query.shape
    weights = (batch, queries, key.shape[1]) if rest[-1].weights else (0,)
    return query.new_empty((batch, queries, value.shape[2])), query.new_empty(weights)


def _fake_backward(
    grad_out: Tensor | None, grad_weights: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    query, key, value, v, bias, mask = rest[:6]
    return (
        *(x.new_empty(x.shape) for x in (query, key, value, v)),
        query.new_empty(0 if bias is None else bias.shape),
        mask.new_empty(mask.shape) if rest[-1].needs_mask_grad else query.new_empty(0),
    )


def _vmap(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch; v and the bias have no batch dimension."""
    n = info.batch_size
    query, key, value, v, bias, attn_mask, seed, options, backend = args
    shared = in_dims[3] is None and in_dims[4] is None
    if not shared or options.dropout_p > 0:  # draws are indexed by each example's own batch
        return one_by_one(additive, n, in_dims, args)
    batch = size_of_batch(query, in_dims[0])
    query, key, value, attn_mask = (
        fold(x, in_dims[place], n, batch)
        for place, x in ((0, query), (1, key), (2, value), (5, attn_mask))
    )
    out, weights = additive.dispatched(
        query, key, value, v, bias, attn_mask, seed, options, backend
    )
    weights = unfold(weights, n) if options.weights else weights.expand(n, 0)
    return (unfold(out, n), weights), (0, 0)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Loop over the examples: each has its own gradients of v and the bias."""
    return one_by_one(additive_backward, info.batch_size, in_dims, args)


_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor v, Tensor? bias, Tensor? attn_mask, "
    "Tensor? seed"
)
_SHAPES = "query: B Tq A; key: B Tk A; value: B Tk Dv; v: A; bias: A; attn_mask: B|1 Tq|1 Tk|1"


def _pairs(query: Tensor, key: Tensor, causal: bool) -> int:
    window = (0, -1, 0) if causal else ()
    return query.shape[0] * visible_pairs(query.shape[1], key.shape[1], *window)


def _flops(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    pairs = _pairs(query, key, rest[-1].causal)
    return additive_flops(pairs, query.shape[2], value.shape[2])


def _flops_backward(
    _: Any,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> int:
    pairs = _pairs(query, key, rest[-1].causal)
    return additive_flops(pairs, query.shape[2], value.shape[2], backward=True)


additive = Operator(
    f"additive_attention({_TENSORS})",
    options=AdditiveOptions,
    returns=2,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    checked_by=("cpu",),
)

additive_backward = Operator(
    f"additive_attention_backward(Tensor? grad_out, Tensor? grad_weights, {_TENSORS})",
    options=AdditiveBackwardOptions,
    returns=6,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; grad_out: B Tq Dv; grad_weights: B Tq Tk",
    checked_by=("cpu",),
)
