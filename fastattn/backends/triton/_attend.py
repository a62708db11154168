"""The launches of attention, of a batch [B, H, L, D] and of packed sequences [T, H, D]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.backends.triton._core import Operand, Options
from fastattn.backends.triton._launch import block_of, launch, operand, plan, precision
from fastattn.backends.triton._sdpa_backward import (
    attention_backward_key_value,
    attention_backward_query,
    attention_statistics,
)
from fastattn.backends.triton._sdpa_forward import attention_forward
from fastattn.backends.triton._table import Launch

__all__ = [
    "attend",
    "differentiate",
    "options_of",
    "pairs",
    "positive_scale",
    "statistics",
    "widths_of",
]

_UNLIMITED = 2**30  # farther than any two places are from each other, and an int32


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: Options, batch: int
) -> tuple[Tensor, Tensor]:
    """Return the output, in the query's memory order, and lse [B, Hq, Lq], or [Hq, T]."""
    out = empty_output(query, value.shape[-1])
    lse = query.new_empty(
        query.shape[:3] if query.ndim == 4 else query.shape[1::-1], dtype=torch.float64
    )
    widths = widths_of(query, value)
    masked = options.seen is not None or options.added is not None
    planned = plan("forward_masked" if masked else "forward", query, widths["BD"], widths["BDV"])
    launch(
        attention_forward,
        planned,
        _programs(planned, options, batch, of_keys=False),
        query.device,
        q=_rows(query),
        k=_rows(key),
        v=_rows(value),
        o=options,
        out=_rows(out),
        p_lse=lse,
        **widths,
    )
    return out, lse


def statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    weight_share: float,
    options: Options,
    batch: int,
    lse: Tensor,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse in two parts, and delta, each as lse and float32."""
    high, low, delta = lse.new_empty((3, *lse.shape), dtype=torch.float32)
    widths = widths_of(query, value)
    planned = plan("statistics", query, widths["BD"], widths["BDV"])
    if grad_lse is not None:
        grad_lse = grad_lse.unsqueeze(3) if query.ndim == 4 else grad_lse.mT.unsqueeze(2)
    launch(
        attention_statistics,
        planned,
        _programs(planned, options, batch, of_keys=False),
        query.device,
        q=_rows(query),
        k=_rows(key),
        v=_rows(value),
        out=_rows(out),
        grad_out=None if grad_out is None else _rows(grad_out),
        grad_lse=None if grad_lse is None else _rows(grad_lse),
        grad_weights=None if grad_weights is None else pairs(grad_weights),
        weight_share=weight_share,
        o=options,
        p_lse=lse.contiguous(),
        p_high=high,
        p_low=low,
        p_delta=delta,
        EXACT=exact,
        **widths,
    )
    return high, low, delta


def differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    weight_share: float,
    options: Options,
    batch: int,
    lse: Tensor,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return the gradients of query, key and value, and what the kernel of the mask's needs too."""
    grad_query, grad_key, grad_value = (empty_output(x, x.shape[-1]) for x in (query, key, value))
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(out.shape)
    high, low, delta = statistics(
        query, key, value, out, grad_out, grad_lse, grad_weights, weight_share, options, batch, lse,
        exact=exact,
    )  # fmt: skip
    widths = widths_of(query, value)
    common: dict[str, Any] = {
        "q": _rows(query),
        "k": _rows(key),
        "v": _rows(value),
        "grad_out": _rows(grad_out),
        "grad_weights": None if grad_weights is None else pairs(grad_weights),
        "weight_share": weight_share,
        "o": options,
        "p_high": high,
        "p_low": low,
        "p_delta": delta,
        **widths,
    }
    planned = plan("backward_query", query, widths["BD"], widths["BDV"])
    launch(
        attention_backward_query,
        planned,
        _programs(planned, options, batch, of_keys=False),
        query.device,
        **common,
        grad_q=_rows(grad_query),
    )
    planned = plan("backward_key_value", query, widths["BD"], widths["BDV"])
    launch(
        attention_backward_key_value,
        planned,
        _programs(planned, options, batch, of_keys=True),
        query.device,
        **common,
        grad_k=_rows(grad_key),
        grad_v=_rows(grad_value),
    )
    return grad_query, grad_key, grad_value, common


def options_of(
    heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    *,
    scale: float,
    offset: int | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Options:
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask = None if attn_mask is None else pairs(attn_mask)
    alibi = None
    if alibi_slopes is not None:
        alibi = operand(alibi_slopes[:, :, None, None])
    added = None if boolean else mask
    threshold = round((1.0 - dropout_p) * 65536) if dropout_p > 0 else None
    return Options(
        heads=heads,
        group=heads // max(kv_heads, 1),
        q_len=q_len,
        k_len=k_len,
        scale=scale,
        offset=offset,
        left=None if window_left < 0 else min(window_left, _UNLIMITED),
        right=None if window_right < 0 else min(window_right, _UNLIMITED),
        seen=mask if boolean else None,
        added=added,
        alibi=alibi,
        softcap=softcap if softcap > 0 else None,
        rescored=1 if softcap > 0 or not (added is None and alibi is None) else None,
        p_seed=seed if dropout_p > 0 else None,
        threshold=threshold,
        kept_scale=None if threshold is None else 65536 / threshold if threshold else 0.0,
    )


def widths_of(query: Tensor, value: Tensor) -> dict[str, Any]:
    width, value_width = query.shape[-1], value.shape[-1]
    return {
        "D": width,
        "DV": value_width,
        "BD": block_of(width),
        "BDV": block_of(value_width),
        "PRECISION": precision(),
    }


def pairs(x: Tensor) -> Operand:
    """[B, H, Lq, Lk] with strides small enough for int32 offsets within a tile."""
    return operand(x if max(x.stride()[2:]) < 2**23 else x.contiguous())


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return (sign * query, the positive rest of scale, sign), which give the same scores.

    The kernels multiply by the scale after the maximum of a row is found.
    """
    if scale > 0:
        return query, scale, 1
    sign = -1 if scale < 0 else 0
    return query * sign, -scale if scale < 0 else 1.0, sign


def _rows(x: Tensor) -> Operand:
    if x.ndim == 4:
        return operand(x)
    row, head, column = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return Operand(x, row, head, row, column)


def _programs(planned: Launch, options: Options, batch: int, *, of_keys: bool) -> int:
    """How many there are: ``_core.locate`` says which is which."""
    length, block, heads = (
        (options.k_len, planned.BN, options.heads // options.group)
        if of_keys
        else (options.q_len, planned.BM, options.heads)
    )
    if options.p_q_starts is None:
        return -(-length // block) * heads * batch
    return (length // block + batch + 1) * heads
