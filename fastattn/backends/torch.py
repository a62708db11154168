"""PyTorch's own fused attention kernel behind the primitive of attention; never its math path.

The fused operators of PyTorch are called directly, so a call that they refuse raises and is never
computed by the math path. ``why_not`` declines every call for which the contract of
``docs/numerics.md`` would not hold: among others float32 and float64, whose gradients exceed the
error bound there. On the CPU it also declines NaN and inf under a mask, for which the inputs are
summed. On a GPU this would synchronize, so there a NaN in a key that only some queries see may
reach all queries.

Some obstacles are known only when the backward pass begins. A gradient of ``lse`` sends the call to
the next backend (``fastattn/ops/sdpa.py``). On the CPU, a ``grad_out`` with NaN or inf under a
mask, and scores so large that a float32 ``lse`` is too inexact to recompute the weights, run the
forward and the backward of fastattn's own kernels (:func:`_native_gradients`), or of the reference
without a native core.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn import compat
from fastattn.backends import _torch_cuda, reference
from fastattn.backends._alloc import empty_output, narrow_expanded
from fastattn.backends.primitives import (
    EVERYWHERE,
    AttentionBackwardOptions,
    AttentionOptions,
    why_not_options,
)

# `why_not` declines most values of these options, each with its own reason.
_SERVED = EVERYWHERE["scaled_dot_product_attention"] - {"partial"}
_FLASH = 1  # of torch.nn.attention.SDPBackend
_DTYPES = (torch.bfloat16, torch.float16)

# PyTorch's lse is float32, so exp(s - lse) is off by |lse| · 2^-24: here by 2^-12, half of what
# rounding to float16 costs.
_LARGEST_LSE = 2.0**12


_forward, _backward = compat.flash_cpu, compat.flash_cpu_backward
_choice = compat.fused_choice


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: AttentionOptions) -> list[str]:
    """Return the reasons why PyTorch's fused kernel cannot run ``op`` on these arguments."""
    missing = why_not_options(options, _SERVED)
    named_tensors: Mapping[str, Any] = tensors
    return _why_not_attend(missing, options=options, **named_tensors)


def _why_not_attend(
    reasons: list[str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """Reasons against a call with these options, or else what ``_why_not_plain`` returns."""
    if isinstance(options, AttentionBackwardOptions) and options.needs_mask_grad:
        reasons.append("the mask's gradient is wanted, which PyTorch's kernel does not compute")
    if grad_lse is not None:
        reasons.append("lse has a gradient, which PyTorch's kernel does not support")
    if options.weights:
        reasons.append("the weights are wanted, which PyTorch's kernel does not return")
    if options.dropout_p:
        reasons.append("dropout draws other numbers in PyTorch's kernel")
    if options.softcap:
        reasons.append("PyTorch's kernel does not support softcap")
    if alibi_slopes is not None:
        reasons.append("PyTorch's kernel does not support ALiBi")
    causal = options.window_right == 0
    if options.window_left != -1 or options.window_right > 0:
        reasons.append("PyTorch's kernel does not support a window")
    if causal and options.offset:
        reasons.append("PyTorch's kernel aligns causal attention to the upper left")
    if causal and attn_mask is not None:
        reasons.append("PyTorch's kernel does not support a mask and causal exclusion together")
    return reasons or _why_not_plain(query, key, value, attn_mask, options.scale, causal)


def _why_not_plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> list[str]:
    """Reasons against plain attention, possibly masked or causal, with these tensors."""
    if query.dtype not in _DTYPES:
        return [f"gradients of {query.dtype} exceed the error bound in PyTorch's kernel"]
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return ["PyTorch's kernel does not support a size of 0"]
    if query.shape[3] != value.shape[3]:
        return ["key and value have different widths, which PyTorch's kernel does not support"]
    if any(x.shape[3] > 1 and x.stride(3) != 1 for x in (query, key, value)):
        return ["the last dimension of query, key or value is not contiguous"]
    if causal and query.shape[2] < key.shape[2]:
        return ["causal exclusion hides the last keys from every query"]
    if not 0.0 < scale < math.inf:
        return [f"a scale of {scale} is not positive and finite"]
    if not query.is_cpu:
        return _torch_cuda.why_not(query, key, value, mask, causal)
    if _forward is None or _backward is None or _choice is None:
        return [f"torch {torch.__version__} has no fused attention operator for the CPU"]
    if mask is not None and mask.dtype is not torch.bool:
        return ["a floating mask may hold numbers for which PyTorch's gradients are wrong"]
    if mask is not None and not _zeroes_masked_rows():
        return [f"torch {torch.__version__} does not give 0 for fully masked rows"]
    if type(query) is not Tensor and type(query) is not torch.nn.Parameter:
        return []  # fake tensors: nothing is computed, and there are no values to check
    grouped = query.shape[1] != key.shape[1]
    if _choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped) != _FLASH:
        return ["PyTorch would not take its fused kernel for these tensors"]
    if causal or mask is not None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not _is_finite(x):
                return [f"{name} has NaN or inf, which PyTorch's kernel spreads under a mask"]
    return []


@functools.cache
def _zeroes_masked_rows() -> bool:
    """Whether this PyTorch returns 0 for output and gradients of fully masked rows, tried once."""
    assert _forward is not None
    assert _backward is not None
    x = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16, device="cpu")
    mask = torch.zeros(1, 1, 2, 2, device="cpu")
    mask[0, 0, 1] = -math.inf
    mask = mask.to(x.dtype)
    with torch.no_grad():
        out, lse = _forward(x, x, x, 0.0, False, attn_mask=mask, scale=1.0)
        lse[0, 0, 1] = 0.0
        grads = _backward(x, x, x, x, out, lse, 0.0, False, attn_mask=mask, scale=1.0)
    zero = out[0, 0, 1].eq(0).all() and grads[0][0, 0, 1].eq(0).all()
    return bool(zero) and all(bool(g.isfinite().all()) for g in grads)


def _is_finite(x: Tensor) -> bool:
    """Whether the sum of all elements is finite: it may overflow, but is fast to compute."""
    return math.isfinite(x.detach().sum())


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, D]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    causal = options.window_right == 0
    if not query.is_cpu:
        out, lse = _torch_cuda.forward(query, key, value, options.scale, causal)
        return _in_order_of(out, query), lse.double(), query.new_empty(0)
    assert _forward is not None
    float_mask = None
    if attn_mask is not None:
        attn_mask = narrow_expanded(attn_mask)
        float_mask = _float_mask(attn_mask, query.dtype, key.shape[2])
    out, lse = _forward(query, key, value, 0.0, causal, attn_mask=float_mask, scale=options.scale)
    lse = lse.to(torch.float64, memory_format=torch.contiguous_format)
    if attn_mask is not None:  # PyTorch's lse of a fully masked row is 0
        lse.masked_fill_(~attn_mask.any(3), -math.inf)
    return _in_order_of(out, query), lse, query.new_empty(0)


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key and value; the mask's is never requested here."""
    assert grad_out is not None  # with a gradient of lse, another backend runs
    assert grad_lse is None
    scale, causal = options.scale, options.window_right == 0
    if not query.is_cpu:
        grads = _torch_cuda.backward(grad_out, query, key, value, out, lse, scale, causal)
        return *_all_in_order(grads, query, key, value), None
    assert _backward is not None
    float_mask = None
    if attn_mask is not None:
        attn_mask = narrow_expanded(attn_mask)
        float_mask = _float_mask(attn_mask, query.dtype, key.shape[2])
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # exp(-inf - 0) is 0
    masked = causal or attn_mask is not None
    if (masked and not _is_finite(grad_out)) or not lse.abs().max() <= _LARGEST_LSE:
        return *_native_gradients(grad_out, query, key, value, attn_mask, scale, causal), None
    if grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    forward_tensors = (grad_out, query, key, value, out, lse.float())
    grads = _backward(*forward_tensors, 0.0, causal, attn_mask=float_mask, scale=scale)
    return *_all_in_order(grads, query, key, value), None


def _float_mask(mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """Convert a boolean mask to the form that PyTorch's kernel adds: 0 where True, else -inf."""
    float_mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
    return float_mask.expand(*mask.shape[:3], keys)


def _all_in_order(grads: tuple[Tensor, ...], *like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each in the memory order of its tensor."""
    query, key, value = (_in_order_of(*pair) for pair in zip(grads, like, strict=True))
    return query, key, value


def _in_order_of(result: Tensor, like: Tensor) -> Tensor:
    """Return the result in the memory order of ``like``: PyTorch's order varies by version."""
    if result.stride() == like.stride():
        return result
    ordered = empty_output(like, result.shape[3])
    return result if result.stride() == ordered.stride() else ordered.copy_(result)


@functools.cache
def _native_backend() -> Any:
    """The CPU backend, or the reference in an installation without a native core."""
    try:
        from fastattn.backends import cpu
    except ImportError:
        return reference
    return cpu


def _native_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value by fastattn's kernels, with their own, exact lse."""
    kernels = _native_backend()
    tensors = (query, key, value, mask, None, None)
    options = AttentionBackwardOptions(scale=scale, window_right=0 if causal else -1)
    out, lse, _ = kernels.scaled_dot_product_attention(*tensors, options=options)
    gradients = kernels.scaled_dot_product_attention_backward(
        grad_out, None, None, *tensors, out, lse, options=options
    )
    return _all_in_order(gradients[:3], query, key, value)
