"""Attention over packed sequences as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._flops import attention_flops, values, visible_pairs
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
_LAST = "Tensor? sinks, Tensor? relative_bias, Tensor? mask_program"  # after lse in the backward
_SHAPES = (
    "query: Tq Hq D; key: Tk Hkv D; value: Tk Hkv Dv; cu_seqlens_q: S; cu_seqlens_k: S; "
    "alibi_slopes: S-1|1 Hq; sinks: 1 Hq; relative_bias: 1 Hq *; Hq % Hkv"
)
_GRADIENTS = "grad_out: Tq Hq Dv; grad_lse: Hq Tq; out: Tq Hq Dv; lse: Hq Tq"


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor]) -> None:
    *tensors, sinks, relative_bias, mask_program, ctx.options, ctx.backend = args
    ctx.save_for_backward(*tensors, *results, sinks, relative_bias, mask_program)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    seen = (*ctx.saved_tensors, ctx.options, ctx.backend)
    given = (grad_out, grad_lse)
    *grads, grad_sinks, grad_table = packed_attention_backward.resume(ctx, given, seen)
    *others, needs_sinks, needs_table, _, _, _ = ctx.needs_input_grad[3:]
    return (
        *grads,
        *(None for _ in others),
        grad_sinks if needs_sinks else None,
        grad_table if needs_table else None,
        None,
        None,
        None,
    )


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
    *_, sinks, relative_bias, _, _ = rest
    return (
        *(empty_output(x, x.shape[2]) for x in (query, key, value)),
        *(
            query.new_empty(0) if x is None else x.new_empty(x.shape)
            for x in (sinks, relative_bias)
        ),
    )


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """Loop over the examples: draws are indexed by each example's own sequences."""
    return one_by_one(packed_attention, info.batch_size, in_dims, args)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    return one_by_one(packed_attention_backward, info.batch_size, in_dims, args)


def _pairs(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, options: Any) -> int:
    """The visible pairs of a head, as far as the lengths tell them; unknown lengths are equal."""
    count = cu_q.shape[0] - 1
    starts, ends = values(cu_q), values(cu_k)
    if starts is None or ends is None:
        lengths = [(query.shape[0] // max(count, 1), key.shape[0] // max(count, 1))] * count
    else:
        lengths = [(starts[b + 1] - starts[b], ends[b + 1] - ends[b]) for b in range(count)]
    window = options.window_left, options.window_right
    offsets = ((q, k, k - q if options.bottom_right else 0) for q, k in lengths)
    return query.shape[1] * sum(visible_pairs(*sizes, *window) for sizes in offsets)


def _flops(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    pairs = _pairs(query, key, rest[0], rest[1], rest[-1])
    return attention_flops(pairs, query.shape[2], value.shape[2])


def _flops_backward(
    _: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> int:
    pairs = _pairs(query, key, rest[0], rest[1], rest[-1])
    return attention_flops(pairs, query.shape[2], value.shape[2], backward=True)


packed_attention = Operator(
    f"varlen_attention({_TENSORS}, {_LAST})",
    options=VarlenOptions,
    returns=2,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)

packed_attention_backward = Operator(
    f"varlen_attention_backward(Tensor? grad_out, Tensor? grad_lse, {_TENSORS}, Tensor out, "
    f"Tensor lse, {_LAST})",
    options=VarlenOptions,
    returns=5,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; {_GRADIENTS}",
    recomputed=("out", "lse"),
    checked_by=("cpu",),
    derived={"scale": lambda _out, _lse, query, *_: default_scale(query.shape[-1])},
)
