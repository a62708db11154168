"""Attention as a differentiable operator: what is saved, how it is derived, batched, and faked.

``scaled_dot_product_attention_backward`` is one more operator, so each derivative reaches the
backends the same way as the forward; its own derivative goes through the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.library import Operator

__all__ = ["attention", "attention_backward"]

_VALUES = (
    "float? scale, SymInt offset, SymInt window_left, SymInt window_right, "
    "float softcap, float dropout_p, int weights"
)


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor, Tensor]) -> None:
    # Never the weights: O(L) memory.
    ctx.save_for_backward(*args[:6], results[0], results[1])
    ctx.values = args[6:]


def _backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    values = ctx.values
    if not values[-2]:  # the weights were not asked for: their stand-in has no gradient
        grad_weights = None
    if grad_out is None and grad_lse is None and grad_weights is None:
        return (None,) * 14
    needs_mask_grad = ctx.needs_input_grad[3]
    seen = (*ctx.saved_tensors, *values[:-1], needs_mask_grad, values[-1])  # the last: the backend
    grads = attention_backward.resume(ctx, (grad_out, grad_lse, grad_weights), seen)
    return *grads[:3], grads[3] if needs_mask_grad else None, *(None,) * 10


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, _ = query.shape
    k_len, weights = key.shape[2], rest[-2]
    shapes = ((0,), (batch, heads, q_len, k_len), (batch, q_len, k_len))
    return (
        empty_output(query, value.shape[3]),
        query.new_empty((batch, heads, q_len), dtype=torch.float64),
        query.new_empty(shapes[weights]),
    )


def _fake_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_mask_grad = rest[-2]
    return (
        empty_output(query, query.shape[3]),
        empty_output(key, key.shape[3]),
        empty_output(value, value.shape[3]),
        attn_mask.new_empty(attn_mask.shape)
        if attn_mask is not None and needs_mask_grad
        else query.new_empty(0),
    )


def default_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[3])


def _vmap(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch."""
    n = info.batch_size
    dropout_p, weights_mode = args[11], args[12]
    if dropout_p > 0:  # the draws count from the first batch in every example
        return _one_by_one(attention, n, in_dims, args)
    batch = _size_of_batch(args[0], in_dims[0])
    folded = [_fold(arg, dim, n, batch) for arg, dim in zip(args[:5], in_dims, strict=False)]
    out, lse, weights = attention.op(*folded, *args[5:])
    weights = _unfold(weights, n) if weights_mode else weights.expand(n, 0)
    return (_unfold(out, n), _unfold(lse, n), weights), (0, 0, 0)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    n = info.batch_size
    dropout_p, needs_mask_grad = args[16], args[18]
    if dropout_p > 0:
        return _one_by_one(attention_backward, n, in_dims, args)
    batch = _size_of_batch(args[3], in_dims[3])
    folded = [_fold(arg, dim, n, batch) for arg, dim in zip(args[:11], in_dims, strict=False)]
    mask = folded[6]
    if needs_mask_grad and mask is not None and mask.shape[0] == 1:
        folded[6] = mask.expand(n * batch, -1, -1, -1)  # a mask common to all, but not its gradient
    *grads, grad_mask = attention_backward.op(*folded, *args[11:])
    if needs_mask_grad:
        grad_mask = _unfold(grad_mask, n)
        if _size_of_batch(args[6], in_dims[6]) == 1:
            grad_mask = grad_mask.sum(1, keepdim=True)
    else:
        grad_mask = grad_mask.expand(n, 0)
    return (*(_unfold(g, n) for g in grads), grad_mask), (0, 0, 0, 0)


def _size_of_batch(x: Tensor, mapped: int | None) -> int:
    """B of a [B, ...] that has the dimension ``mapped`` besides."""
    return x.shape[1 if mapped == 0 else 0]


def _fold(x: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """[B, ...] with a mapped dimension of size n anywhere, or none -> [n * B, ...]."""
    if x is None or (dim is None and x.shape[0] == 1 != batch):
        return x
    x = x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    if x.shape[1] != batch:  # a mask common to the batch
        x = x.expand(n, batch, *x.shape[2:])
    return x.flatten(0, 1)


def _unfold(x: Tensor, n: int) -> Tensor:
    return x.unflatten(0, (n, x.shape[0] // n))


def _one_by_one(
    operator: Operator, n: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    def example(i: int) -> list[Any]:
        return [
            arg if dim is None else arg.select(dim, i)
            for arg, dim in zip(args, in_dims, strict=True)
        ]

    results = [operator.op(*example(i)) for i in range(n)]
    stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


attention = Operator(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    f"Tensor? alibi_slopes, Tensor? seed, {_VALUES})",
    returns=3,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    opaque=("alibi_slopes",),
    derived={"scale": lambda query, *_: default_scale(query)},
)

attention_backward = Operator(
    "scaled_dot_product_attention_backward(Tensor? grad_out, Tensor? grad_lse, "
    "Tensor? grad_weights, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    f"Tensor? alibi_slopes, Tensor? seed, Tensor out, Tensor lse, {_VALUES}, bool needs_mask_grad)",
    returns=4,
    fake=_fake_backward,
    vmap=_vmap_backward,
    recomputed=("out", "lse"),
    derived={"scale": lambda _out, _lse, _weights, query, *_: default_scale(query)},
)
