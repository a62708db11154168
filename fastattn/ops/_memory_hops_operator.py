"""Memory hops as a differentiable operator: what is saved, its derivative, batching and fake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.autograd import _fold, _one_by_one, _size_of_batch, _unfold
from fastattn.library import Operator, runs_eagerly

__all__ = ["hop_attention", "hop_attention_backward", "share"]

_VALUES = "SymInt hops, str activation, str normalize, float scale, bool weights"
_TENSORS = (
    "Tensor query, Tensor in_memory, Tensor? out_memory, Tensor? hop_proj, "
    "Tensor? memory_mask, Tensor? memory_bias"
)
_HOPS, _WEIGHTS = 6, 10  # among the primitive's arguments


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, ...]) -> None:
    _, trace, stats, _ = results
    ctx.mark_non_differentiable(trace, stats)
    # Never the weights: what is saved does not grow with the memory.
    ctx.save_for_backward(*args[:6], trace, stats)
    ctx.values = args[6:]


def _backward(
    ctx: Any, grad_out: Tensor | None, _trace: None, _stats: None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 12
    if grad_out is None and grad_weights is None:
        return nothing
    query, in_memory, out_memory, hop_proj, bias = (
        ctx.needs_input_grad[n] for n in (0, 1, 2, 3, 5)
    )
    wanted = (query, in_memory, out_memory, hop_proj, bias)
    needed = sum(1 << n for n, want in enumerate(wanted) if want)
    *values, backend = ctx.values
    seen = (*ctx.saved_tensors, *values, needed, backend)
    grads = hop_attention_backward.resume(ctx, (grad_out, grad_weights), seen)
    kept = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    return (*kept[:4], None, kept[4], *nothing[6:])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _fake(query: Tensor, in_memory: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead, hops, weights = query.shape[:-1], rest[_HOPS - 2], rest[_WEIGHTS - 2]
    wide = compute_dtype(query.dtype)
    return (
        query.new_empty(query.shape),
        query.new_empty((*lead, 2 * hops + 1, query.shape[-1]), dtype=wide),
        query.new_empty((*lead, hops, 2), dtype=wide),
        query.new_empty((*lead, hops, in_memory.shape[-2]) if weights else (0,)),
    )


def _fake_backward(
    grad_out: Tensor | None, grad_weights: Tensor | None, *seen: Any
) -> tuple[Tensor, ...]:
    query, in_memory, out_memory, hop_proj, _, bias = seen[:6]
    needed = seen[-2]
    tensors = (query, in_memory, out_memory, hop_proj, bias)
    return tuple(
        x.new_empty(x.shape)
        if x is not None and (n == 0 or needed >> n & 1)
        else query.new_empty(0)
        for n, x in enumerate(tensors)
    )


def _vmap(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch; a projection has none, so its own goes by turns."""
    n = info.batch_size
    if args[3] is not None and in_dims[3] is not None:
        return _one_by_one(hop_attention, n, in_dims, args)
    batch = args[0].shape[1 if in_dims[0] == 0 else 0]
    folded = [
        x if position == 3 else _fold(x, dim, n, batch)
        for position, (x, dim) in enumerate(zip(args[:6], in_dims, strict=False))
    ]
    out, trace, stats, p = hop_attention.op(*folded, *args[6:])
    p = _unfold(p, n) if args[_WEIGHTS] else p.expand(n, 0)
    return (_unfold(out, n), _unfold(trace, n), _unfold(stats, n), p), (0, 0, 0, 0)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch, or by turns: what an example's batch shares has a
    gradient of its own in each example, and a memory that has none is not repeated."""
    n, needed = info.batch_size, args[-2]
    query, in_memory, out_memory, hop_proj, _, bias = args[2:8]
    batch = _size_of_batch(query, in_dims[2])
    memories = [
        x is None or (needed >> bit & 1 and _size_of_batch(x, in_dims[place]) == batch)
        for bit, place, x in ((1, 3, in_memory), (2, 4, out_memory), (4, 7, bias))
    ]
    if hop_proj is not None or not all(memories):
        return _one_by_one(hop_attention_backward, n, in_dims, args)
    folded = [_fold(x, dim, n, batch) for x, dim in zip(args[:10], in_dims, strict=False)]
    results = hop_attention_backward.op(*folded, *args[10:])
    given = (query, in_memory, out_memory, hop_proj, bias)
    pairs = zip(results, given, strict=True)
    return tuple(g.expand(n, 0) if x is None else _unfold(g, n) for g, x in pairs), (0,) * 5


hop_attention = Operator(
    f"memory_hop_attention({_TENSORS}, {_VALUES})",
    returns=4,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
)

hop_attention_backward = Operator(
    "memory_hop_attention_backward(Tensor? grad_out, Tensor? grad_weights, "
    f"{_TENSORS}, Tensor trace, Tensor stats, {_VALUES}, int needed)",
    returns=5,
    fake=_fake_backward,
    vmap=_vmap_backward,
    recomputed=("trace", "stats"),
)


class _Share(torch.autograd.Function):
    """The one memory of an expanded batch [B, ...] (stride 0) -> [1, ...].

    The derivative by each of the B equal entries is the B-th part of the whole, so that their sum,
    which is what the expansion's own derivative takes, is the whole; it is not stored B times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.batch = x.shape[0]
        return x[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad / ctx.batch).expand(ctx.batch, *grad.shape[1:])


def share(memory: Tensor) -> Tensor:
    """Undo the expansion of a memory over its batch, where nothing watches."""
    if memory.shape[0] <= 1 or memory.stride(0) != 0 or not runs_eagerly(memory):
        return memory
    if memory.requires_grad and torch.is_grad_enabled():
        return _Share.apply(memory)
    return memory[:1]
