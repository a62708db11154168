"""The shortest way for the commonest calls of attention.

At 8 heads of 16 rows of 64, half of the time of PyTorch's own attention is not arithmetic. The
general way, ``sdpa.prepare`` and ``library.Operator``, takes longer still to find out that nothing
special was asked for. Here that is found out first; every line was measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn.autograd.sdpa import attention, attention_backward, default_scale
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.checks import DTYPES
from fastattn.eager import has_plain_memory, nothing_watches

# (dtype, D, Dv) -> the name of the native backend, its module, and the module that goes before it
# from so many queries on, or None. For the calls that come here a native backend looks at nothing
# else; the other one is asked each time.
_native: dict[tuple[torch.dtype, int, int], tuple[str, Any, Any, int]] = {}
evidence.on_change(_native.clear)


def attend_plainly(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Tensor | None:
    """Return the output of a call without other options, or None: ask the general way.

    None, unless query, key and value are [B, H, L, D] in plain memory of the CPU, of one dtype and
    batch, the mask needs no gradient, and nothing is wrong.
    """
    if (
        not (type(query) is type(key) is type(value) is Tensor)
        or (is_causal is not True and is_causal is not False)
        or (enable_gqa is not True and enable_gqa is not False)
        or not nothing_watches()
        or dispatch.forced.get() not in dispatch.SHORT_WAY
        or torch.is_autocast_enabled("cpu")
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or query.is_neg()  # a view that promises -x
        or key.is_neg()
        or value.is_neg()
    ):
        return None
    try:
        dtype = query.dtype
        batch, heads, q_len, width = query.shape
        key_batch, key_heads, k_len, key_width = key.shape
        value_batch, value_heads, v_len, value_width = value.shape
    except (RuntimeError, ValueError):  # nested; another number of dimensions
        return None
    if (
        not (dtype is key.dtype is value.dtype)
        or not (batch == key_batch == value_batch)
        or key_heads != value_heads
        or (heads != key_heads and not (enable_gqa and key_heads and heads % key_heads == 0))
        or k_len != v_len
        or width != key_width
        or width == 0
        or (scale is not None and type(scale) is not float)
    ):
        return None
    if attn_mask is not None:
        if is_causal or not _is_constant_mask(attn_mask, dtype):
            return None
        try:
            attn_mask = attn_mask.expand(batch, heads, q_len, k_len)
        except RuntimeError:
            return None
    if scale is None:
        scale = default_scale(query)
    native = _native.get((dtype, width, value_width)) or _find_native(query, key, value)
    if native is None:
        return None
    backend, module, first, least = native
    try:
        if (
            first is not None
            and q_len >= least
            and not dispatch.forced.get()
            and first.serves_plainly(query, key, value, attn_mask, scale, is_causal)
        ):
            backend, module = "torch", first
        if torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        ):
            return _attend(query, key, value, attn_mask, scale, is_causal, backend, module)
        return module.plain_attention(query, key, value, attn_mask, scale, is_causal, False)[0]
    except RuntimeError:  # sparse, or another tensor without memory: the long way says it clearly
        return None


def _is_constant_mask(mask: Any, dtype: torch.dtype) -> bool:
    return (
        type(mask) is Tensor
        and mask.is_cpu
        and not mask.is_neg()
        and not mask.requires_grad
        and mask.layout is torch.strided
        and mask.dtype in (torch.bool, dtype, torch.float32)
        and (mask.dtype is not torch.float32 or dtype is not torch.float64)
    )


class _Plain(compat.SingleLevelFunction):
    """Attention with a gradient, of one result and with the fewest steps."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
        backend: str,
        module: Any,
    ) -> Tensor:
        out, lse = module.plain_attention(query, key, value, mask, scale, causal, True)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = scale, causal, backend, module
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 8
        query, key, value, mask, out, lse = ctx.saved_tensors
        scale, causal, backend, module = ctx.call
        if (
            type(grad_out) is Tensor
            and not torch.is_grad_enabled()
            and nothing_watches()
            and has_plain_memory(grad_out)
            and out.stride(3) == 1
            and out.numel()
            and key.numel()
        ):
            grads = module.plain_attention_backward(
                grad_out, query, key, value, mask, out, lse, scale, causal
            )
            return *grads, None, None, None, None, None
        ctx.eager = True
        if mask is not None:
            mask = _unexpanded(mask)
        seen = (query, key, value, mask, None, None, out, lse)
        options = AttentionBackwardOptions(scale=scale, window_right=0 if causal else -1)
        grads = attention_backward.resume(ctx, (grad_out, None, None), (*seen, options, backend))
        return *grads[:3], None, None, None, None, None


_attend: Any = _Plain.apply


def _unexpanded(mask: Tensor) -> Tensor:
    """The mask with one element where it repeats one."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _find_native(query: Tensor, key: Tensor, value: Tensor) -> Any:
    if query.dtype not in DTYPES:
        return None
    name = attention.name
    found = evidence.choose("backends", "cpu", name, query.dtype)
    first, least = None, 0
    if found is not None and found.use[0] == "torch":
        first, least = dispatch.load("torch"), found.least_queries
    backend, *_ = dispatch.PRIORITY["cpu"]
    module: Any = dispatch.load(backend)
    if not hasattr(module, "plain_attention") or attention.reasons(
        backend, _arguments(query, key, value)
    ):
        return None
    native = backend, module, first, least
    _native[query.dtype, query.shape[3], value.shape[3]] = native
    return native


def _arguments(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    return (query, key, value, None, None, None, AttentionOptions(scale=1.0))
