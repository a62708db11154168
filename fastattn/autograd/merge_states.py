"""Merged states of attention as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.library import Operator

__all__ = ["merge_states"]


def _fake(out_a: Tensor, lse_a: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor]) -> None:
    *states, ctx.options, ctx.backend = args
    ctx.save_for_backward(*states)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    seen = (*ctx.saved_tensors, ctx.options, ctx.backend)
    return *merge_states_backward.resume(ctx, (grad_out, grad_lse), seen), None, None


def _fake_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, *seen: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in seen[:4])


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """The mapped dimension is one more in front of the others."""
    *tensors, options, backend = args
    lifted = _in_front(info.batch_size, in_dims, tensors)
    return merge_states.dispatched(*lifted, options, backend), (0, 0)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    *tensors, options, backend = args
    lifted = _in_front(info.batch_size, in_dims, tensors)
    return merge_states_backward.dispatched(*lifted, options, backend), (0,) * 4


def _in_front(n: int, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Tensor | None]:
    pairs = zip(tensors, dims, strict=True)
    return [
        x if x is None else x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in pairs
    ]


_STATES = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b"

_SHAPES = "out_a: ... L Dv; lse_a: ... L; out_b: ... L Dv; lse_b: ... L"


def _flops(_: Any, out_a: Tensor, *rest: Any) -> int:
    return 4 * out_a.numel()


def _flops_backward(_: Any, grad_out: Any, grad_lse: Any, out_a: Tensor, *rest: Any) -> int:
    return 8 * out_a.numel()


merge_states = Operator(
    f"merge_states({_STATES})",
    returns=2,
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    flops=_flops,
    shapes=_SHAPES,
)
merge_states_backward = Operator(
    f"merge_states_backward(Tensor? grad_out, Tensor? grad_lse, {_STATES})",
    returns=4,
    fake=_fake_backward,
    vmap=_vmap_backward,
    flops=_flops_backward,
    shapes=f"{_SHAPES}; grad_out: ... L Dv; grad_lse: ... L",
)
