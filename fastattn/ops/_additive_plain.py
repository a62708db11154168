"""The fast path of additive attention, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch, evidence
from fastattn.autograd.additive import additive, additive_backward
from fastattn.backends.primitives import AdditiveBackwardOptions
from fastattn.checks import DTYPES
from fastattn.eager import runs_eagerly
from fastattn.fast_path import differentiable, is_open

# dtype -> the name of the native backend and its module.
_native: dict[torch.dtype, tuple[str, Any]] = {}
evidence.on_change(_native.clear)
# By is_causal, for both passes.
_OPTIONS = [AdditiveBackwardOptions(causal=causal) for causal in (False, True)]


def attend_additively(
    query: Any, key: Any, value: Any, v: Any, bias: Any, is_causal: Any
) -> Tensor | None:
    """Return the output of a call without masks, dropout and weights, or None: take the general
    path.

    Returns None unless query, key and value are [B, L, A] with the same dtype and batch size, v
    and bias are [A], no dimension is empty, and all arguments are valid.
    """
    if (
        (is_causal is not True and is_causal is not False)
        or v is None
        or not is_open(query, key, value)
        or not runs_eagerly(v, bias)
    ):
        return None
    try:
        batch, queries, width = query.shape
        _, keys, value_width = value.shape
        fits = key.shape == (batch, keys, width) and value.shape[0] == batch
        fits = fits and v.shape == (width,) and (bias is None or bias.shape == (width,))
    except (AttributeError, RuntimeError, ValueError):  # None, nested, or not 3-D
        return None
    dtype = query.dtype
    if (
        not fits
        or not (dtype is key.dtype is value.dtype is v.dtype)
        or not v.is_cpu
        or (bias is not None and not (bias.dtype is dtype and bias.is_cpu))
        or not (batch and queries and keys and width and value_width)
    ):
        return None
    native = _native.get(dtype) or _find_native(query, key, value, v)
    if native is None:
        return None
    options = _OPTIONS[is_causal]
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
    ):
        return _attend(query, key, value, None, options, None, *native, v, bias)
    return native[1].plain_additive(query, key, value, None, options, None, False, v, bias)[0]


def _resume(
    ctx: Any,
    grad_out: Tensor,
    saved: Any,
    options: AdditiveBackwardOptions,
    unused: None,
    backend: str,
    v: Tensor,
    bias: Tensor | None,
) -> Any:
    query, key, value, _ = saved
    seen = (query, key, value, v, bias, None, None, options, backend)
    grads = additive_backward.resume(ctx, (grad_out, None), seen)
    return *grads[:4], None if bias is None else grads[4]


_attend = differentiable("plain_additive", 1, _resume)


def _find_native(query: Tensor, key: Tensor, value: Tensor, v: Tensor) -> Any:
    if query.dtype not in DTYPES:
        return None
    backend = additive.choose((query, key, value, v, None, None, None, _OPTIONS[0]))
    module: Any = dispatch.load(backend)
    if not hasattr(module, "plain_additive"):
        return None
    _native[query.dtype] = backend, module
    return backend, module
