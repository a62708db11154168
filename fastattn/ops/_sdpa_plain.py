"""The fast path of attention, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch, evidence, masks
from fastattn.autograd.sdpa import attention, attention_backward, default_scale
from fastattn.backends._alloc import unexpanded
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.fast_path import Native, are_plain, calls_are_open, differentiable

_native = Native("plain_attention", attention)
# As `_native.found`, with the module preferred over the native one (or None), and the number of
# queries from which it is preferred. For plain calls nothing else affects whether a native backend
# can run; the preferred module is asked on each call.
_found: dict[int, tuple[str, Any, Any, int]] = {}
evidence.on_change(_found.clear)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def attend_plainly(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    sinks: Any = None,
    mask: Any = None,
) -> Tensor | None:
    """Return the output of a call with default options, or None: take the general path.

    Returns None unless query, key and value are [B, H, L, D] with the same dtype and batch size,
    ``attn_mask`` needs no gradient, sinks have the dtype of the kernel, no dimension is empty, and
    all arguments are valid.
    """
    if (
        (is_causal is not True and is_causal is not False)
        or (enable_gqa is not True and enable_gqa is not False)
        or (scale is not None and type(scale) is not float)
    ):
        return None
    if not calls_are_open():
        return None
    number = _native.call(query, key, value, enable_gqa)
    if not number:
        return None
    requires_grad = number & 1
    if attn_mask is not None:
        if is_causal or not _is_constant_mask(attn_mask, query.dtype):
            return None
        try:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        except RuntimeError:  # not broadcastable
            return None
    if sinks is not None:
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        # Written out: a function would take 0.1 us more.
        try:
            if (
                type(sinks) not in _PLAIN_TYPES
                or not sinks.is_cpu
                or sinks.shape != query.shape[1:2]
                or sinks.dtype is not wide
                or sinks.is_neg()
                or not sinks.data_ptr()
            ):
                return None
        except RuntimeError:  # it has no address
            return None
        requires_grad = requires_grad or sinks.requires_grad
    native = _found.get(number | 1) or _find_native(query, key, value, number | 1)
    if native is None:
        return None
    backend, module, first, least = native
    if scale is None:
        scale = default_scale(query.shape[3])
    if (
        first is not None
        and sinks is None
        and mask is None
        and query.shape[2] >= least
        and not dispatch.forced.get()
        and first.serves_plainly(query, key, value, attn_mask, scale, is_causal)
    ):
        backend, module = "torch", first
    wants = requires_grad and torch.is_grad_enabled()
    if mask is not None:
        program = masks.program(attention.name, mask, query, key.shape[2], 0)
        more = sinks, program
        if wants:
            return _attend(query, key, value, attn_mask, scale, is_causal, backend, module, *more)
        return module.plain_attention(query, key, value, attn_mask, scale, is_causal, False, *more)[
            0
        ]
    # A call that unpacks a tuple takes 0.1 us more.
    if sinks is None:
        if wants:
            return _attend(query, key, value, attn_mask, scale, is_causal, backend, module)
        return module.plain_attention(query, key, value, attn_mask, scale, is_causal, False)[0]
    if wants:
        return _attend(query, key, value, attn_mask, scale, is_causal, backend, module, sinks)
    return module.plain_attention(query, key, value, attn_mask, scale, is_causal, False, sinks)[0]


def _is_constant_mask(mask: Any, dtype: torch.dtype) -> bool:
    return (
        are_plain(mask)
        and not mask.requires_grad
        and mask.dtype in (torch.bool, dtype, torch.float32)
        and (mask.dtype is not torch.float32 or dtype is not torch.float64)
    )


def _resume(
    ctx: Any,
    grad_out: Tensor,
    saved: Any,
    scale: float,
    causal: bool,
    backend: str,
    sinks: Tensor | None = None,
    mask_program: Tensor | None = None,
) -> Any:
    query, key, value, mask, out, lse = saved
    if mask is not None:
        mask = unexpanded(mask)
    seen = {"query": query, "key": key, "value": value, "attn_mask": mask, "out": out, "lse": lse}
    seen["mask_program"] = mask_program
    if sinks is not None:
        seen["sinks"] = sinks[None]
    grads = (grad_out, None, None)
    tensors = attention_backward.tensors(**seen)[len(grads) :]
    record = AttentionBackwardOptions(scale=scale, window_right=0 if causal else -1)
    found = attention_backward.resume(ctx, grads, (*tensors, record, backend))
    return found[:3] if sinks is None else (*found[:3], found[4][0])


_attend = differentiable("plain_attention", 0, _resume)


def _find_native(query: Tensor, key: Tensor, value: Tensor, number: int) -> Any:
    found = evidence.choose("backends", "cpu", attention.name, query.dtype)
    first, least = None, 0
    if found is not None and found.use[0] == "torch":
        first, least = dispatch.load("torch"), found.least_queries
    backend, *_ = dispatch.PRIORITY["cpu"]
    module: Any = dispatch.load(backend)
    tensors = attention.tensors(query=query, key=key, value=value)
    call = (*tensors, AttentionOptions(scale=1.0))
    if not hasattr(module, "plain_attention") or attention.reasons(backend, call):
        return None
    _found[number] = backend, module, first, least
    return _found[number]
