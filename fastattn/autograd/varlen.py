"""Attention over packed sequences as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.autograd.sdpa import default_scale
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import VarlenOptions
from fastattn.batching import one_by_one
from fastattn.library import Operator

__all__ = ["packed_attention", "packed_attention_backward"]

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? alibi_slopes, Tensor? seed"
)
_SINKS = "Tensor? sinks"


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor]) -> None:
    *tensors, sinks, ctx.options, ctx.backend = args
    ctx.save_for_backward(*tensors, *results, sinks)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    seen = (*ctx.saved_tensors, ctx.options, ctx.backend)
    *grads, grad_sinks = packed_attention_backward.resume(ctx, (grad_out, grad_lse), seen)
    *others, needs_sinks_grad, _, _ = ctx.needs_input_grad[3:]
    nothing = [None for _ in others]
    return *grads, *nothing, grad_sinks if needs_sinks_grad else None, None, None


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _ = query.shape
    return (
        empty_output(query, value.shape[2]),
        query.new_empty((heads, rows), dtype=torch.float64),
    )


def _fake_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *_, sinks, _ = rest
    grads = tuple(empty_output(x, x.shape[2]) for x in (query, key, value))
    return *grads, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """Loop over the examples: draws are indexed by each example's own sequences."""
    return one_by_one(packed_attention, info.batch_size, in_dims, args)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    return one_by_one(packed_attention_backward, info.batch_size, in_dims, args)


packed_attention = Operator(
    f"varlen_attention({_TENSORS}, {_SINKS})",
    options=VarlenOptions,
    returns=2,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    opaque=("alibi_slopes",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)

packed_attention_backward = Operator(
    f"varlen_attention_backward(Tensor? grad_out, Tensor? grad_lse, {_TENSORS}, Tensor out, "
    f"Tensor lse, {_SINKS})",
    options=VarlenOptions,
    returns=4,
    fake=_fake_backward,
    vmap=_vmap_backward,
    recomputed=("out", "lse"),
    derived={"scale": lambda _out, _lse, query, *_: default_scale(query.shape[-1])},
)
