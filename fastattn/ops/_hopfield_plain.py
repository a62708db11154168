"""The fast path of Hopfield retrieval, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fastattn import evidence
from fastattn.autograd.hopfield import hopfield_backward, hopfield_states
from fastattn.autograd.sdpa import attention, attention_backward, default_scale
from fastattn.backends.primitives import (
    AttentionBackwardOptions,
    HopfieldBackwardOptions,
    HopfieldOptions,
    extended,
)
from fastattn.fast_path import Native, calls_are_open, differentiable

_native = Native("plain_retrieval", hopfield_states)


def retrieve_plainly(
    state: Any, stored: Any, projection: Any, beta: Any, steps_max: Any, eps: Any
) -> Tensor | None:
    """Return the result of a call that unrolls its steps and has no other options, or None: take
    the general path.

    Returns None unless state is [B, H, L, D], stored is [B, H, N, D] with contiguous rows and its
    own batch dimension, projection is [B, H, N, Dv], no dimension is empty, at least one step may
    be taken, and all arguments are valid.
    """
    if (
        (steps_max is not None and (type(steps_max) is not int or not 0 < steps_max < 2**63))
        or (beta is not None and (type(beta) is not float or not 0.0 < beta < math.inf))
        or type(eps) is not float
        or not 0.0 <= eps < math.inf
        or not calls_are_open()
    ):
        return None
    number = _native.call(state, stored, projection)
    if not number:
        return None
    native = _native.found.get(number | 1) or _find(number | 1, state, stored)
    if native is None:
        return None
    scale = default_scale(state.shape[3]) if beta is None else beta
    options = _options(scale, -1 if steps_max is None else steps_max, eps)
    call = state, stored, projection, None, options, None
    if number & 1 and torch.is_grad_enabled():
        return _retrieve(*call, *native)
    return native[1].plain_retrieval(*call, False)[0]


@functools.lru_cache(maxsize=64)
def _options(scale: float, steps_max: int, eps: float) -> HopfieldOptions:
    return HopfieldOptions(scale=scale, steps_max=steps_max, eps=eps)


def _resume(
    ctx: Any, grad_out: Tensor, saved: Any, options: HopfieldOptions, _: None, backend: str
) -> Any:
    """The steps are taken again, so that the gradients depend on them."""
    state, stored, projection, _mask, out, lse, *_rest = saved
    value = stored if projection is None else projection
    start = (state.flatten(0, 1), stored.flatten(0, 1), None, None, None)
    xi, taken, ends = hopfield_states(*start, options)
    grads = (grad_out, None, None)
    tensors = attention_backward.tensors(
        query=xi.reshape(state.shape), key=stored, value=value, out=out, lse=lse
    )[len(grads) :]
    record = AttentionBackwardOptions(scale=options.scale)
    grad_xi, grad_stored, grad_value, *_rest = attention_backward.resume(
        ctx, grads, (*tensors, record, backend)
    )
    if projection is None:
        grad_stored = grad_stored + grad_value
    needed = sum(1 << n for n in range(2) if ctx.needs_input_grad[n])
    if not needed:
        return None, grad_stored, grad_value
    seen = (*start, taken, ends, extended(HopfieldBackwardOptions, options, needed=needed), backend)
    grad_state, of_steps, *_rest = hopfield_backward.resume(ctx, (grad_xi.flatten(0, 1),), seen)
    if ctx.needs_input_grad[1]:
        grad_stored = grad_stored + of_steps.reshape(stored.shape)
    return grad_state.reshape(state.shape), grad_stored, grad_value


_retrieve = differentiable("plain_retrieval", 0, _resume)


def _find(number: int, state: Tensor, stored: Tensor) -> Any:
    row = evidence.choose("backends", "cpu", attention.name, state.dtype)
    if row.use[0] == "torch":  # the general path reads the states by it
        return None
    return _native.find(number, state, stored, None, None, None, HopfieldOptions())
