"""Attention as an operator: saved tensors, derivative, batching rule, fake kernel.

``scaled_dot_product_attention_backward`` is a separate operator, so backward reaches the backends
in the same way as forward. Its own derivative goes through the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._flops import attention_flops, visible_pairs
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions, extended
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.library import Operator

__all__ = ["attention", "attention_backward"]

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? seed"
)
_LAST = (  # those after lse in the backward
    "Tensor? sinks, Tensor? relative_bias, Tensor? positions, Tensor? mask_program"
)
_SHAPES = (
    "query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; attn_mask: B|1 Hq|1 Lq|1 Lk|1; "
    "alibi_slopes: B|1 Hq; sinks: B|1 Hq; relative_bias: B|1 Hq *; positions: Lk; Hq % Hkv"
)
_GRADIENTS = (
    "grad_out: B Hq Lq Dv; grad_lse: B Hq Lq; grad_weights: B Hq Lq Lk / B Lq Lk; "
    "out: B Hq Lq Dv; lse: B Hq Lq"
)


# Indices in the tensors of the forward.
_MASK, _SINKS, _TABLE = 3, 6, 7


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, attn_mask, alibi_slopes, seed, *last, ctx.options, ctx.backend = args
    out, lse, _ = results  # the weights are not saved: O(L) memory
    ctx.save_for_backward(query, key, value, attn_mask, alibi_slopes, seed, out, lse, *last)


def _backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if not ctx.options.weights:  # ignore the gradient of the empty placeholder
        grad_weights = None
    if grad_out is None and grad_lse is None and grad_weights is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = ctx.needs_input_grad
    options = extended(AttentionBackwardOptions, ctx.options, needs_mask_grad=needs[_MASK])
    grads = attention_backward.resume(
        ctx, (grad_out, grad_lse, grad_weights), (*ctx.saved_tensors, options, ctx.backend)
    )
    grad_query, grad_key, grad_value, grad_mask, grad_sinks, grad_table = grads
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_mask if needs[_MASK] else None,
        None,
        None,
        grad_sinks if needs[_SINKS] else None,
        grad_table if needs[_TABLE] else None,
        None,
        None,
        None,
        None,
    )


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, _ = query.shape
    k_len, weights = key.shape[2], rest[-1].weights
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
) -> tuple[Tensor, ...]:
    *_, sinks, relative_bias, _, _, options = rest
    more = (sinks, relative_bias)
    return (
        empty_output(query, query.shape[3]),
        empty_output(key, key.shape[3]),
        empty_output(value, value.shape[3]),
        attn_mask.new_empty(attn_mask.shape)
        if attn_mask is not None and options.needs_mask_grad
        else query.new_empty(0),
        *(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in more),
    )


def _pairs(query: Tensor, key: Tensor, options: AttentionOptions) -> int:
    """The visible pairs, as far as the sizes tell them."""
    batch, heads, q_len, _ = query.shape
    offset = _last_at_last(query, key) if options.offset is None else options.offset
    window = (offset, options.window_left, options.window_right)
    return batch * heads * visible_pairs(q_len, key.shape[2], *window)


def _flops(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    return attention_flops(_pairs(query, key, rest[-1]), query.shape[3], value.shape[3])


def _flops_backward(
    _: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> int:
    widths = query.shape[3], value.shape[3]
    return attention_flops(_pairs(query, key, rest[-1]), *widths, backward=True)


def default_scale(width: int) -> float:
    return 1.0 / math.sqrt(width)


def _last_at_last(query: Tensor, key: Tensor, *_: Any) -> int:
    """The offset with which the last query is at the last key."""
    return key.shape[2] - query.shape[2]


def _cannot_fold(options: AttentionOptions, in_dims: Sequence[int | None]) -> bool:
    # Draws are indexed by each example's own batch. Positions and a mask program have no batch
    # dimension.
    return options.dropout_p > 0 or any(dim is not None for dim in in_dims[-2:])


def _folded(
    tensors: Sequence[Any], in_dims: Sequence[int | None], n: int, batch: int
) -> list[Tensor | None]:
    *others, positions, mask_program = tensors  # a program repeats its entries for each example
    dims = in_dims[:-2]
    folded = [fold(x, d, n, batch) for x, d in zip(others, dims, strict=True)]
    return [*folded, positions, mask_program]


def _vmap(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch."""
    n = info.batch_size
    *tensors, options, backend = args
    if _cannot_fold(options, in_dims):
        return one_by_one(attention, n, in_dims, args)
    batch = size_of_batch(tensors[0], in_dims[0])
    folded = _folded(tensors, in_dims, n, batch)
    out, lse, weights = attention.dispatched(*folded, options, backend)
    weights = unfold(weights, n) if options.weights else weights.expand(n, 0)
    return (unfold(out, n), unfold(lse, n), weights), (0, 0, 0)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    n = info.batch_size
    *tensors, options, backend = args
    if _cannot_fold(options, in_dims):
        return one_by_one(attention_backward, n, in_dims, args)
    batch = size_of_batch(tensors[_QUERY], in_dims[_QUERY])
    folded = _folded(tensors, in_dims, n, batch)
    wanted = {_BACKWARD_MASK: options.needs_mask_grad}
    wanted |= {place: folded[place] is not None for place in (_BACKWARD_SINKS, _BACKWARD_TABLE)}
    for n_th, needed in wanted.items():
        x = folded[n_th]
        if needed and x is not None and x.shape[0] == 1:
            # the examples share it, but not its gradient
            folded[n_th] = x.expand(n * batch, *x.shape[1:])
    found = attention_backward.dispatched(*folded, options, backend)
    results = [unfold(g, n) for g in found[:3]]
    for (n_th, needed), x in zip(wanted.items(), found[3:], strict=True):
        if not needed:
            results.append(x.expand(n, 0))
        elif size_of_batch(tensors[n_th], in_dims[n_th]) == 1:
            results.append(unfold(x, n).sum(1, keepdim=True))
        else:
            results.append(unfold(x, n))
    return tuple(results), (0,) * len(results)


# Indices in the tensors of the backward: after three gradients; the last also after out and lse.
_QUERY, _OUT = 3, 9
_BACKWARD_MASK, _BACKWARD_SINKS, _BACKWARD_TABLE = _MASK + 3, _SINKS + 5, _TABLE + 5


class _Backward(Operator):
    def _run(self, backend: str, tensors: Sequence[Any], options: Any) -> Any:
        grad_lse = tensors[1]
        if backend != "torch" or grad_lse is None:
            return super()._run(backend, tensors, options)
        return compat.run_outside(self._by_ours, tensors, options)

    def _by_ours(self, tensors: Sequence[Any], options: Any) -> Any:
        """PyTorch's kernel takes no gradient of lse. Ours do, with the lse of their own forward."""
        seen, last = tensors[_QUERY:_OUT], tensors[_BACKWARD_SINKS:]
        backend = dispatch.choose(attention.name, (*seen, *last), options, without="torch")
        out, lse, _ = attention.run(*seen, *last, options, backend)
        return super()._run(backend, (*tensors[:_QUERY], *seen, out, lse, *last), options)


attention = Operator(
    f"scaled_dot_product_attention({_TENSORS}, {_LAST})",
    options=AttentionOptions,
    returns=3,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={
        "scale": lambda query, *_: default_scale(query.shape[-1]),
        "offset": _last_at_last,
    },
)

attention_backward = _Backward(
    "scaled_dot_product_attention_backward(Tensor? grad_out, Tensor? grad_lse, "
    f"Tensor? grad_weights, {_TENSORS}, Tensor out, Tensor lse, {_LAST})",
    options=AttentionBackwardOptions,
    returns=6,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; {_GRADIENTS}",
    recomputed=("out", "lse"),
    checked_by=("cpu",),
    derived={
        "scale": lambda _out, _lse, _weights, query, *_: default_scale(query.shape[-1]),
        "offset": lambda _out, _lse, _weights, *seen: _last_at_last(*seen),
    },
)
