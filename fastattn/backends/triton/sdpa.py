"""Attention on Triton: from tensors to operands, and the launches of each primitive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.backends.triton._core import Operand, Options
from fastattn.backends.triton._launch import block_of, launch, operand, plan, precision
from fastattn.backends.triton._sdpa_backward import (
    attention_backward_key_value,
    attention_backward_mask,
    attention_backward_query,
    attention_statistics,
)
from fastattn.backends.triton._sdpa_forward import attention_forward, attention_weights

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_backward"]

_UNLIMITED = 2**30  # farther than any two places are from each other, and an int32


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    batch, heads, q_len, _ = query.shape
    k_len = key.shape[2]
    out = empty_output(query, value.shape[3])
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float64)
    query, scale, _ = _positive_scale(query, scale)
    options = options_of_call(
        query, key, attn_mask, alibi_slopes, seed, scale, offset, window_left, window_right,
        softcap, dropout_p,
    )  # fmt: skip
    widths = _widths(query, value)
    planned = plan("forward", query, widths["BD"], widths["BDV"])
    launch(
        attention_forward,
        planned,
        planned.q_tiles(q_len) * batch * heads,
        query.device,
        q=operand(query),
        k=operand(key),
        v=operand(value),
        o=options,
        out=operand(out),
        p_lse=lse,
        **widths,
    )
    if weights == 0:
        return out, lse, query.new_empty(0)

    averaged = weights == 2
    applied = query.new_empty((batch, 1 if averaged else heads, q_len, k_len))
    high, low, _ = _statistics(
        query, key, value, out, None, None, None, 1.0, options, lse, widths, exact=False
    )
    planned = plan("forward", query, widths["BD"])
    launch(
        attention_weights,
        planned,
        planned.tiles(q_len, k_len) * applied.shape[0] * applied.shape[1],
        query.device,
        q=operand(query),
        k=operand(key),
        o=options,
        p_high=high,
        p_low=low,
        weights=operand(applied),
        AVERAGED=averaged,
        D=widths["D"],
        BD=widths["BD"],
        PRECISION=widths["PRECISION"],
    )
    return out, lse, applied[:, 0] if averaged else applied


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
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
    needs_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and the mask, see ``docs/design.md``."""
    batch, heads, q_len, width = query.shape
    kv_heads, k_len = key.shape[1:3]
    grad_query = empty_output(query, width)
    grad_key = empty_output(key, width)
    grad_value = empty_output(value, value.shape[3])
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(out.shape)
    weight_share = 1.0
    if grad_weights is not None and weights == 2:
        grad_weights = grad_weights.unsqueeze(1)
        weight_share = 1.0 / max(heads, 1)
    query, scale, sign = _positive_scale(query, scale)
    options = options_of_call(
        query, key, attn_mask, alibi_slopes, seed, scale, offset, window_left, window_right,
        softcap, dropout_p,
    )  # fmt: skip
    widths = _widths(query, value)
    # The row sums of a bias's gradient are exactly those of lse's: there no rounding of out may be.
    exact = needs_mask_grad or query.dtype == torch.float32
    high, low, delta = _statistics(
        query, key, value, out, grad_out, grad_lse, grad_weights, weight_share, options, lse,
        widths, exact=exact,
    )  # fmt: skip
    common: dict[str, Any] = {
        "q": operand(query),
        "k": operand(key),
        "v": operand(value),
        "grad_out": operand(grad_out),
        "grad_weights": None if grad_weights is None else _pairs(grad_weights),
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
        planned.q_tiles(q_len) * batch * heads,
        query.device,
        **common,
        grad_q=operand(grad_query),
    )
    planned = plan("backward_key_value", query, widths["BD"], widths["BDV"])
    launch(
        attention_backward_key_value,
        planned,
        planned.k_tiles(k_len) * batch * kv_heads,
        query.device,
        **common,
        grad_k=operand(grad_key),
        grad_v=operand(grad_value),
    )
    if sign != 1:
        grad_query.mul_(sign)
    if not needs_mask_grad:
        return grad_query, grad_key, grad_value, None

    assert attn_mask is not None
    mask_batch, mask_heads, mask_q, mask_k = attn_mask.shape
    sum_q, sum_k = mask_q != q_len, mask_k != k_len
    parts = query.new_zeros(
        (
            mask_batch,
            mask_heads,
            planned.q_tiles(q_len) if sum_q else q_len,
            planned.k_tiles(k_len) if sum_k else k_len,
        ),
        dtype=torch.float32,
    )
    launch(
        attention_backward_mask,
        planned,
        planned.tiles(q_len, k_len) * mask_batch * mask_heads,
        query.device,
        **common,
        p_grad=parts,
        mask_heads=mask_heads,
        batch_sum=batch // max(mask_batch, 1),
        head_sum=heads // max(mask_heads, 1),
        SUM_Q=sum_q,
        SUM_K=sum_k,
    )
    summed = [dim for dim, sums in ((2, sum_q), (3, sum_k)) if sums]
    if summed:
        parts = parts.sum(summed, keepdim=True, dtype=torch.float64)
    return grad_query, grad_key, grad_value, parts.to(attn_mask.dtype)


def _statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    weight_share: float,
    options: Options,
    lse: Tensor,
    widths: dict[str, Any],
    *,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse in two parts, and delta, each [B, Hq, Lq] float32."""
    high, low, delta = lse.new_empty((3, *lse.shape), dtype=torch.float32)
    planned = plan("statistics", query, widths["BD"], widths["BDV"])
    launch(
        attention_statistics,
        planned,
        planned.q_tiles(lse.shape[2]) * lse.shape[0] * lse.shape[1],
        query.device,
        q=operand(query),
        k=operand(key),
        v=operand(value),
        out=operand(out),
        grad_out=None if grad_out is None else operand(grad_out),
        grad_lse=None if grad_lse is None else operand(grad_lse.unsqueeze(3)),
        grad_weights=None if grad_weights is None else _pairs(grad_weights),
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


def _widths(query: Tensor, value: Tensor) -> dict[str, Any]:
    width, value_width = query.shape[3], value.shape[3]
    return {
        "D": width,
        "DV": value_width,
        "BD": block_of(width),
        "BDV": block_of(value_width),
        "PRECISION": precision(),
    }


def _pairs(x: Tensor) -> Operand:
    """[B, H, Lq, Lk] with strides small enough for int32 offsets within a tile."""
    return operand(x if max(x.stride()[2:]) < 2**23 else x.contiguous())


def _positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return (sign * query, the positive rest of scale, sign), which give the same scores.

    The kernels multiply by the scale after the maximum of a row is found.
    """
    if scale > 0:
        return query, scale, 1
    sign = -1 if scale < 0 else 0
    return query * sign, -scale if scale < 0 else 1.0, sign


def options_of_call(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Options:
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask = None if attn_mask is None else _pairs(attn_mask)
    alibi = None
    if alibi_slopes is not None:
        alibi = operand(alibi_slopes[:, :, None, None])
    added = None if boolean else mask
    threshold = round((1.0 - dropout_p) * 65536) if dropout_p > 0 else None
    return Options(
        heads=query.shape[1],
        group=query.shape[1] // max(key.shape[1], 1),
        q_len=query.shape[2],
        k_len=key.shape[2],
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
