"""Memory hops as an operator: saved tensors, derivative, batching rule, fake kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._flops import attention_flops, product_flops
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions, extended
from fastattn.batching import fold, one_by_one, size_of_batch, unfold
from fastattn.eager import runs_eagerly
from fastattn.library import Operator

__all__ = ["hop_attention", "hop_attention_backward", "share"]

_TENSORS = (
    "Tensor query, Tensor in_memory, Tensor? out_memory, Tensor? hop_proj, "
    "Tensor? memory_mask, Tensor? memory_bias"
)


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, ...]) -> None:
    _, trace, stats, _ = results
    ctx.mark_non_differentiable(trace, stats)
    # The weights are not saved, so the saved tensors do not grow with the memory.
    *tensors, ctx.options, ctx.backend = args
    ctx.save_for_backward(*tensors, trace, stats)


def _backward(
    ctx: Any, grad_out: Tensor | None, _trace: None, _stats: None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not ctx.options.weights:  # ignore the gradient of the empty placeholder
        grad_weights = None
    if grad_out is None and grad_weights is None:
        return (None,) * len(ctx.needs_input_grad)
    query, in_memory, out_memory, hop_proj, _mask, bias, *_ = ctx.needs_input_grad
    wanted = (query, in_memory, out_memory, hop_proj, bias)
    needed = sum(1 << n for n, want in enumerate(wanted) if want)
    options = extended(MemoryHopBackwardOptions, ctx.options, needed=needed)
    seen = (*ctx.saved_tensors, options, ctx.backend)
    grads = hop_attention_backward.resume(ctx, (grad_out, grad_weights), seen)
    *kept, grad_bias = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *kept, None, grad_bias, None, None


def _fake(query: Tensor, in_memory: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead, hops, weights = query.shape[:-1], rest[-1].hops, rest[-1].weights
    wide = torch.promote_types(query.dtype, torch.float32)
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
    needed = seen[-1].needed
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
    """Fold the mapped dimension into the batch; loop if the projection is mapped (no batch)."""
    n = info.batch_size
    query, in_memory, out_memory, hop_proj, mask, bias, options, backend = args
    if hop_proj is not None and in_dims[3] is not None:
        return one_by_one(hop_attention, n, in_dims, args)
    batch = size_of_batch(query, in_dims[0])
    query, in_memory, out_memory, mask, bias = (
        fold(x, in_dims[place], n, batch)
        for place, x in ((0, query), (1, in_memory), (2, out_memory), (4, mask), (5, bias))
    )
    out, trace, stats, p = hop_attention.dispatched(
        query, in_memory, out_memory, hop_proj, mask, bias, options, backend
    )
    p = unfold(p, n) if options.weights else p.expand(n, 0)
    return (unfold(out, n), unfold(trace, n), unfold(stats, n), p), (0, 0, 0, 0)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension into the batch if possible, else loop: tensors shared by an
    example's batch have one gradient per example, and a memory without batch is not repeated."""
    *tensors, options, backend = args
    n, needed = info.batch_size, options.needed
    query, in_memory, out_memory, hop_proj, _, bias = tensors[2:8]
    batch = size_of_batch(query, in_dims[2])
    memories = [
        x is None or (needed >> bit & 1 and size_of_batch(x, in_dims[place]) == batch)
        for bit, place, x in ((1, 3, in_memory), (2, 4, out_memory), (4, 7, bias))
    ]
    if hop_proj is not None or not all(memories):
        return one_by_one(hop_attention_backward, n, in_dims, args)
    folded = [fold(x, dim, n, batch) for x, dim in zip(tensors, in_dims, strict=True)]
    results = hop_attention_backward.dispatched(*folded, options, backend)
    given = (query, in_memory, out_memory, hop_proj, bias)
    pairs = zip(results, given, strict=True)
    return tuple(g.expand(n, 0) if x is None else unfold(g, n) for g, x in pairs), (0,) * 5


_SHAPES = (
    "query: B D / B Q D; in_memory: B|1 N D / B|1 * N D; out_memory: B|1 N D / B|1 * N D; "
    "hop_proj: D D / * D D; memory_mask: B|1 Q|1 *|1 N|1; memory_bias: B|1 Q|1 *|1 N|1"
)
_GRADIENTS = (
    "grad_out: B D / B Q D; grad_weights: B K N / B Q K N; trace: B * D / B Q * D; "
    "stats: B K 2 / B Q K 2"
)


def _work(
    query: Tensor, in_memory: Tensor, hop_proj: Tensor | None, options: MemoryHopOptions
) -> tuple[int, int]:
    """The products of a row and a query, in elements: of the memories and of ``hop_proj``."""
    states = query.numel() * options.hops  # [B, Q, K, D]
    return states * in_memory.shape[-2], 0 if hop_proj is None else states * query.shape[-1]


def _flops(_: Any, query: Tensor, in_memory: Tensor, out_memory: Any, *rest: Any) -> int:
    of_rows, of_projection = _work(query, in_memory, rest[0], rest[-1])
    return attention_flops(of_rows, 1, 1) + product_flops(of_projection)


def _flops_backward(
    _: Any,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Any,
    *rest: Any,
) -> int:
    of_rows, of_projection = _work(query, in_memory, rest[0], rest[-1])
    backward = attention_flops(of_rows, 1, 1, backward=True)
    return backward + product_flops(of_projection, backward=True)


hop_attention = Operator(
    f"memory_hop_attention({_TENSORS})",
    options=MemoryHopOptions,
    returns=4,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
    checked_by=("cpu",),
)

hop_attention_backward = Operator(
    "memory_hop_attention_backward(Tensor? grad_out, Tensor? grad_weights, "
    f"{_TENSORS}, Tensor trace, Tensor stats)",
    options=MemoryHopBackwardOptions,
    returns=5,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; {_GRADIENTS}",
    recomputed=("trace", "stats"),
    checked_by=("cpu",),
)


class _Share(torch.autograd.Function):
    """The one memory of an expanded batch [B, ...] (stride 0) -> [1, ...].

    The backward of ``expand()`` sums over the batch, so each of the B entries receives grad / B, as
    an expanded tensor that is not stored B times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.batch = x.shape[0]
        return x[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad / ctx.batch).expand(ctx.batch, *grad.shape[1:])


def share(memory: Tensor) -> Tensor:
    """Undo a memory's expansion over its batch, unless a tracer, mode or transform is active."""
    if memory.shape[0] <= 1 or memory.stride(0) != 0 or not runs_eagerly(memory):
        return memory
    if memory.requires_grad and torch.is_grad_enabled():
        return _Share.apply(memory)
    return memory[:1]
