"""Local attention as a PyTorch operator; ``luong_attention`` uses it for local windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._flops import attention_flops
from fastattn.backends.primitives import LocalOptions
from fastattn.batching import fold, size_of_batch, unfold
from fastattn.library import Operator

__all__ = ["local_attention"]


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lead, window = query.shape[:2], rest[-1].rows(key.shape[1])
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((*lead, value.shape[2])), query.new_empty((*lead, window), dtype=dtype)


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.options, ctx.backend = args
    _, weights = results
    ctx.save_for_backward(*tensors, weights)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_weights is None:
        return (None,) * len(ctx.needs_input_grad)
    seen = (*ctx.saved_tensors, ctx.options, ctx.backend)
    grads = local_attention_backward.resume(ctx, (grad_out, grad_weights), seen)
    return *grads, *(None for _ in ctx.needs_input_grad[len(grads) :])


def _fake_backward(
    grad_out: Tensor | None, grad_weights: Tensor | None, *seen: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in seen[:4])


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """Fold the mapped dimension into the batch."""
    *tensors, options, backend = args
    n, batch = info.batch_size, size_of_batch(tensors[0], in_dims[0])
    folded = [fold(x, dim, n, batch) for x, dim in zip(tensors, in_dims, strict=True)]
    results = local_attention.dispatched(*folded, options, backend)
    return tuple(unfold(x, n) for x in results), (0, 0)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    *tensors, options, backend = args
    n, batch = info.batch_size, size_of_batch(tensors[2], in_dims[2])
    folded = [fold(x, dim, n, batch) for x, dim in zip(tensors, in_dims, strict=True)]
    grads = local_attention_backward.dispatched(*folded, options, backend)
    return tuple(unfold(x, n) for x in grads), (0,) * 4


def _pairs(query: Tensor, key: Tensor, options: LocalOptions) -> int:
    """The pairs of whole windows: which keys exist depends on the positions."""
    return query.shape[0] * query.shape[1] * min(2 * options.reach + 1, key.shape[1])


def _flops(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    return attention_flops(_pairs(query, key, rest[-1]), query.shape[2], value.shape[2])


def _flops_backward(
    _: Any,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> int:
    pairs = _pairs(query, key, rest[-1])
    return attention_flops(pairs, query.shape[2], value.shape[2], backward=True)


_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor positions, Tensor? padding, Tensor? factor"
)
_SHAPES = (
    "query: B Lq D; key: B Lk D; value: B Lk Dv; positions: B Lq; padding: B Lk; factor: B Lq W"
)

local_attention = Operator(
    f"local_attention({_TENSORS})",
    options=LocalOptions,
    returns=2,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    opaque=("factor",),
    checked_by=("cpu",),
)
local_attention_backward = Operator(
    f"local_attention_backward(Tensor? grad_out, Tensor? grad_weights, {_TENSORS}, Tensor weights)",
    options=LocalOptions,
    returns=4,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; grad_out: B Lq Dv; grad_weights: B Lq W; weights: B Lq W",
    recomputed=("weights",),
    checked_by=("cpu",),
)
