"""The fast path of local attention, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn.autograd.local_attention import local_attention, local_attention_backward
from fastattn.backends.primitives import LocalOptions
from fastattn.fast_path import Native, calls_are_open, differentiable

_native = Native("plain_local", local_attention)


def attend_locally(
    query: Any, key: Any, value: Any, positions: Any, padding: Any, reach: int, bell: bool
) -> Tensor | None:
    """Return the output of a call without dropout, or None: take the general path.

    Returns None unless query [B, Lq, D], key [B, Lk, D] and value [B, Lk, Dv] have the same dtype
    and contiguous columns, positions [B, Lq] the dtype of the computation, and no dimension is
    empty.
    """
    if not calls_are_open():
        return None
    number = _native.call(query, key, value, positions, padding)
    if not number:
        return None
    options = _options(reach, bell)
    native = _native.found.get(number | 1) or _native.find(
        number | 1, query, key, value, positions, padding, None, options
    )
    if native is None:
        return None
    call = query, key, value, padding, options, None
    if number & 1 and torch.is_grad_enabled():
        return _attend(*call, *native, positions)
    return native[1].plain_local(*call, False, positions)[0]


@functools.lru_cache(maxsize=64)
def _options(reach: int, bell: bool) -> LocalOptions:
    return LocalOptions(reach=reach, bell=bell)


def _resume(
    ctx: Any,
    grad_out: Tensor,
    saved: Any,
    options: LocalOptions,
    unused: None,
    backend: str,
    positions: Tensor,
) -> Any:
    query, key, value, padding, weights = saved
    seen = (query, key, value, positions, padding, None, weights, options, backend)
    return local_attention_backward.resume(ctx, (grad_out, None), seen)


_attend = differentiable("plain_local", 1, _resume)
