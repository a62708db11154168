"""The shortest way for the commonest calls of attention.

At 8 heads of 16 rows of 64, half of the time of PyTorch's own attention is not arithmetic. The
general way, ``sdpa.prepare`` and ``library.Operator``, takes longer still to find out that nothing
special was asked for. Here that is found out first; every line was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.autograd import attention, default_scale
from fastattn.library import nothing_watches
from fastattn.ops._sdpa_arguments import DTYPES

# (dtype, D, Dv) -> the name of the native backend, its primitive and its plain_attention. For the
# calls that come here a backend looks at nothing else.
_native: dict[
    tuple[torch.dtype, int, int], tuple[str, Callable[..., Any], Callable[..., Tensor]]
] = {}


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
        or dispatch.forced.get()
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
        attn_mask = _constant_mask(attn_mask, dtype, (batch, heads, q_len, k_len))
        if attn_mask is None or is_causal:
            return None
    if scale is None:
        scale = default_scale(query)
    native = _native.get((dtype, width, value_width)) or _find_native(query, key, value)
    if native is None:
        return None
    backend, primitive, attend = native
    try:
        if torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        ):
            args = _arguments(query, key, value, attn_mask, scale, is_causal)
            return attention.with_gradient(*args, backend)[0]
        if attn_mask is None:
            return attend(query, key, value, scale, is_causal)
        return primitive(
            query,
            key,
            value,
            attn_mask,
            scale=scale,
            offset=0,
            window_left=-1,
            window_right=-1,
            softcap=0.0,
            dropout_p=0.0,
            weights=0,
        )[0]
    except RuntimeError:  # sparse, or another tensor without memory: the long way says it clearly
        return None


def _constant_mask(
    mask: Any, dtype: torch.dtype, scores: tuple[int, int, int, int]
) -> Tensor | None:
    """Return a plain mask without gradient as [B|1, Hq|1, Lq|1, Lk|1]; None if it is not one."""
    if type(mask) is not Tensor or not mask.is_cpu or mask.is_neg() or mask.requires_grad:
        return None
    if mask.layout is not torch.strided or mask.dtype not in (torch.bool, dtype, torch.float32):
        return None
    shape = mask.shape
    missing = 4 - len(shape)
    if missing < 0 or any([n != 1 and n != m for n, m in zip(shape, scores[missing:])]):  # noqa: B905, C419
        return None
    return mask.view((1,) * missing + tuple(shape)) if missing else mask


def _find_native(query: Tensor, key: Tensor, value: Tensor) -> Any:
    if query.dtype not in DTYPES:
        return None
    backend = attention.choose(_arguments(query, key, value, None, 1.0, False))
    attend = getattr(dispatch.load(backend), "plain_attention", None)
    if attend is None:
        return None
    native = backend, attention.primitive(backend), attend
    _native[query.dtype, query.shape[3], value.shape[3]] = native
    return native


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Any, ...]:
    tensors = (query, key, value, mask, None, None)
    return (*tensors, scale, 0, -1, 0 if is_causal else -1, 0.0, 0.0, 0)
