"""The fast path of additive attention, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.autograd.additive import additive, additive_backward
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions
from fastattn.fast_path import Native, calls_are_open, differentiable

_native = Native("plain_additive", additive)


def attend_additively(
    query: Any, key: Any, value: Any, v: Any, bias: Any, is_causal: Any
) -> Tensor | None:
    """Return the output of a call without masks, dropout and weights, or None: take the general
    path.

    Returns None unless query, key and value are [B, L, A] with the same dtype and batch size, v
    and bias are [A], no dimension is empty, and all arguments are valid.
    """
    if (is_causal is not True and is_causal is not False) or not calls_are_open():
        return None
    number = _native.call(query, key, value, v, bias)
    if not number:
        return None
    native = _native.found.get(number | 1) or _native.find(
        number | 1, query, key, value, v, None, None, None, AdditiveOptions()
    )
    if native is None:
        return None
    if number & 1 and torch.is_grad_enabled():
        return _attend(query, key, value, None, is_causal, None, *native, v, bias)
    return native[1].plain_additive(query, key, value, None, is_causal, None, False, v, bias)[0]


def _resume(
    ctx: Any,
    grad_out: Tensor,
    saved: Any,
    causal: bool,
    unused: None,
    backend: str,
    v: Tensor,
    bias: Tensor | None,
) -> Any:
    query, key, value, _ = saved
    options = AdditiveBackwardOptions(causal=causal)
    seen = (query, key, value, v, bias, None, None, options, backend)
    grads = additive_backward.resume(ctx, (grad_out, None), seen)
    return *grads[:4], None if bias is None else grads[4]


_attend = differentiable("plain_additive", 1, _resume)
