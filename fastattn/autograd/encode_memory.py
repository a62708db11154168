"""Memory encoding as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.batching import one_by_one
from fastattn.library import Operator

__all__ = ["encode", "encode_backward"]


def _fake(tokens: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    models, batch, slots, _ = tokens.shape
    return weight.new_empty((models, batch, weight.shape[1], slots, weight.shape[3]))


def _fake_backward(
    grad: Tensor, tokens: Tensor, factors: Tensor, options: EncodeMemoryBackwardOptions
) -> tuple[Tensor, Tensor]:
    models, _, tables, slots, dim = grad.shape
    return (
        grad.new_empty((models, tables, options.rows, dim)),
        grad.new_empty((models, tables, slots, dim) if options.temporal else (0,)),
    )


def _save(ctx: Any, args: Sequence[Any], result: Tensor) -> None:
    tokens, weight, factors, temporal, options, ctx.backend = args
    ctx.save_for_backward(tokens, factors)
    ctx.options = EncodeMemoryBackwardOptions(
        rows=weight.shape[2], temporal=temporal is not None, padding_idx=options.padding_idx
    )


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """dA[x_ij] += l_j o dm_i, dT_i += dm_i; l is a constant."""
    if grad is None:
        return (None,) * 6
    seen = (*ctx.saved_tensors, ctx.options, ctx.backend)
    grad_weight, grad_temporal = encode_backward.resume(ctx, (grad,), seen)
    return None, grad_weight, None, grad_temporal if ctx.options.temporal else None, None, None


def _folded(x: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """[R, ...] with a mapped dimension of size n at any position, or none -> [n * R, ...]."""
    if x is None:
        return None
    x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
    """Fold the mapped dimension into R, the dimension of models."""
    n = info.batch_size
    _, _, factors, _, options, backend = args
    if in_dims[2] is not None:  # mapped factors: one call per example
        (stacked,), _ = one_by_one(encode, n, in_dims, args)
        return stacked, 0
    tokens, weight, temporal = (_folded(args[i], in_dims[i], n) for i in (0, 1, 3))
    out: Tensor = encode.dispatched(tokens, weight, factors, temporal, options, backend)
    return out.unflatten(0, (n, out.shape[0] // n)), 0


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    n = info.batch_size
    _, _, factors, options, backend = args
    if in_dims[2] is not None:
        return one_by_one(encode_backward, n, in_dims, args)
    grad, tokens = (_folded(args[i], in_dims[i], n) for i in (0, 1))
    grad_weight, grad_temporal = encode_backward.dispatched(grad, tokens, factors, options, backend)
    if options.temporal:
        grad_temporal = grad_temporal.unflatten(0, (n, grad_temporal.shape[0] // n))
    else:
        grad_temporal = grad_temporal.expand(n, 0)
    return (grad_weight.unflatten(0, (n, grad_weight.shape[0] // n)), grad_temporal), (0, 0)


def _flops(out: Tensor, tokens: Tensor, *rest: Any) -> int:
    return out.numel() * (2 * tokens.shape[-1] + 1)


def _flops_backward(_: Any, grad: Tensor, tokens: Tensor, *rest: Any) -> int:
    return grad.numel() * (2 * tokens.shape[-1] + 1)


encode = Operator(
    "encode_memory(Tensor tokens, Tensor weight, Tensor factors, Tensor? temporal)",
    options=EncodeMemoryOptions,
    returns=1,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes="tokens: R B N J; weight: R G V D; factors: J D; temporal: R G N D",
    opaque=("factors",),
    checked_by=("cpu",),
)
encode_backward = Operator(
    "encode_memory_backward(Tensor grad, Tensor tokens, Tensor factors)",
    options=EncodeMemoryBackwardOptions,
    returns=2,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes="grad: R B G N D; tokens: R B N J; factors: J D",
    opaque=("factors",),
    checked_by=("cpu",),
)
