"""Shared by the definitions: products, softmax and sums that leave out excluded pairs."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: float32 for 16-bit inputs, else their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def visible_pairs(distance: Tensor, mask: Tensor | None, left: int, right: int) -> Tensor | None:
    """Return which pairs are visible, broadcastable to [B, Hq, Lq, Lk]; None if all pairs are.

    A pair is visible if ``-right <= distance <= left`` (-1: no limit), unless the mask excludes it.
    """
    conditions: list[Tensor] = []
    conditions += [distance <= left] if left >= 0 else []
    conditions += [distance >= -right] if right >= 0 else []
    if mask is not None:
        conditions += [mask if mask.dtype == torch.bool else mask != -INF]
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = visible & condition
    return visible


def distances(q_len: int, k_len: int, offset: int, device: torch.device) -> Tensor:
    """d_ij = i + offset - j, [Lq, Lk]."""
    return torch.arange(q_len, device=device)[:, None] + offset - torch.arange(k_len, device=device)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[B, Hq, M, N] @ [B, Hkv, N, P]: query head h uses key head h // (Hq // Hkv).

    The heads of a group share b, so they are stacked as rows instead of repeating b.
    """
    batch, q_heads, m, n = a.shape
    kv_heads, p = b.shape[1], b.shape[3]
    if q_heads == kv_heads:
        return a @ b
    return (a.reshape(batch, kv_heads, q_heads // kv_heads * m, n) @ b).reshape(
        batch, q_heads, m, p
    )


def replace_nonfinite(x: Tensor) -> Tensor:
    """x with 0 for NaN and inf, so that its product with a zero weight or gradient is 0."""
    return torch.where(torch.isfinite(x), x, 0.0)


def dot_products(q: Tensor, k: Tensor, guarded: bool) -> Tensor:
    """q_i . k_j [B, Hq, Lq, Lk], ``guarded`` if some pairs are excluded.

    A selection drops excluded products later. This does not work for the derivatives, dq_i =
    sum_j ds_ij k_j and dk_j = sum_i ds_ij q_i: there an excluded pair has ds_ij = 0, and 0 * NaN is
    NaN. So autograd differentiates the product of finite operands, and NaN and inf are added to it.
    """
    # Not k.mT, which the tracing ONNX exporter does not support.
    dots = matmul(q, k.transpose(-2, -1))
    if not guarded:
        return dots
    not_finite = torch.where(torch.isfinite(dots), 0.0, dots).detach()
    return matmul(replace_nonfinite(q), replace_nonfinite(k).transpose(-2, -1)) + not_finite


def softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(s) and logsumexp(s) over the last dimension; 0 and -inf for a row of -inf."""
    if s.shape[-1] == 0:
        return s, s.sum(-1) - INF  # amax needs an element
    # The result does not depend on m, so m is detached. In a row of -inf, -inf - m must not be NaN.
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == -INF, 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    # Also select before the division and the logarithm: their derivatives at 0 are not finite.
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -INF, m + torch.log(total))
    return e / total, lse.squeeze(-1)


def weighted_sum(w: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """sum_j w_ij v_j over the visible pairs only [B, Hq, Lq, Dv].

    The finite elements of v use an ordinary product. The others cannot, because 0 * inf is NaN, so
    they are counted: NaN counts as both +inf and -inf. A sum with +inf terms only is +inf, with
    -inf terms only -inf, and with both NaN.
    """
    nan = torch.isnan(v)
    infinities = torch.cat([(v == INF) | nan, (v == -INF) | nan], dim=-1)  # [B, Hkv, Lk, 2 * Dv]
    up, down = (matmul(visible.to(w.dtype), infinities.to(w.dtype)) > 0).chunk(2, dim=-1)
    infinite = torch.where(up, INF, 0.0) - torch.where(down, INF, 0.0)
    # The weights sum to 1, so the product keeps the value, and the row's gradient is not finite.
    nonfinite_part = torch.where(infinite == 0, 0.0, infinite.to(w.dtype) * w.sum(-1, keepdim=True))
    return matmul(w, replace_nonfinite(v)) + nonfinite_part
