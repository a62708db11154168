"""Hard attention: samples one key for each query, composed from the attention core."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.ops.sdpa import scaled_dot_product_attention

_NAME = "hard_attention"
_ESTIMATORS = ("reinforce", "straight_through", "gumbel")


def hard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    estimator: str = "reinforce",
    scale: float | None = None,
    temperature: float = 1.0,
    deterministic: bool = False,
    generator: torch.Generator | None = None,
    need_weights: bool = False,
) -> Any:
    r"""Attend to a single key, sampled with its attention weight as the probability.

    .. math:: j \sim p_i = softmax(scale \cdot query_i \, key^T + mask), \qquad out_i = value_j

    (The stochastic attention of Show, Attend and Tell, Xu et al. 2015,
    https://arxiv.org/abs/1502.03044.) Sampling has no derivative; an estimator replaces it:

    ==================== =======================================================================
    ``estimator``        the gradient of query and key
    ==================== =======================================================================
    ``reinforce``        none from ``out``; ``log_prob`` = log p_ij is returned too, for a loss that
                         adds -(reward - baseline) * log_prob (Williams 1992)
    ``straight_through`` as for soft attention (Bengio et al. 2013, https://arxiv.org/abs/1308.3432)
    ``gumbel``           as for the weights softmax((log p + g) / temperature), g being the Gumbel
                         noise that chose j (Jang et al. 2017, https://arxiv.org/abs/1611.01144)
    ==================== =======================================================================

    The gradient of ``value`` is exact: it goes to the chosen rows.

    Args:
        query: [..., L, D] with any leading dimensions, float32, float64, bfloat16 or float16.
        key: [..., S, D], with the leading dimensions of query.
        value: [..., S, Dv].
        attn_mask: broadcastable to [..., L, S]: bool, True takes part, or floating, added.
        scale: None is 1 / sqrt(D).
        temperature: positive; used by ``gumbel``.
        deterministic: take the most probable key instead of sampling one, for evaluation.
        generator: the source of the noise; None is the default generator.
        need_weights: also return the one-hot weights, [..., L, S].

    Returns:
        ``out`` [..., L, Dv]; or a tuple of it, ``log_prob`` [..., L] (float32, or float64) for
        "reinforce", and the weights if requested. A fully masked row has out 0 and log_prob 0. A
        row that sees NaN in a score is NaN.

    Raises:
        TypeError, ValueError: an unknown estimator, a temperature that is not positive, leading
            dimensions that differ, and all errors of attention.

    Examples:
        >>> import torch
        >>> from fastattn import hard_attention
        >>> x = 100 * torch.eye(3)
        >>> hard_attention(x, x, torch.arange(3.0)[:, None], estimator="straight_through")
        tensor([[0.],
                [1.],
                [2.]])
    """
    _check(query, key, value, estimator, temperature)
    for name, flag in (("deterministic", deterministic), ("need_weights", need_weights)):
        checks.check_flag(_NAME, name, flag)
    if scale is not None:
        scale = checks.check_real(_NAME, "scale", scale)
    if generator is not None:
        checks.check_generator(_NAME, generator, query.device)
    if attn_mask is not None:
        attn_mask = checks.as_stored_mask(_NAME, attn_mask, query.device)
        checks.check_dense(_NAME, attn_mask=attn_mask)
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k = query.detach().to(dtype), key.detach().to(dtype)
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = (*query.shape[:-1], key.shape[-2])

    # argmax(log p + Gumbel noise) is a sample from p. The noise is passed as an additive mask.
    noise = None
    if not deterministic:
        noise = torch.empty(scores, dtype=dtype, device=query.device)
        noise = -torch.log(noise.exponential_(generator=generator))
    bias = _perturb(attn_mask, noise)
    columns = key.detach().new_zeros(1).to(dtype).expand(*key.shape[:-1], 1)
    bias = None if bias is None else bias.detach()
    weights = scaled_dot_product_attention(q, k, columns, bias, scale=scale, need_weights=True)[1]
    if scores[-1] == 0:
        index, visible = None, weights.new_zeros(scores[:-1], dtype=torch.bool)
        is_nan = visible
        out = value.new_zeros((*scores[:-1], value.shape[-1]))
    else:
        largest, index = weights.max(-1)
        visible, is_nan = largest != 0, largest.isnan()
        rows = index[..., None].expand(*index.shape, value.shape[-1])
        # The product, unlike a selection, also makes the gradient of a NaN row NaN.
        factor = torch.where(is_nan, math.nan, 1.0)[..., None].to(value.dtype)
        out = torch.where(visible[..., None], value.gather(-2, rows) * factor, 0.0)

    if estimator != "reinforce":
        soft_mask, soft_scale = attn_mask, scale
        if estimator == "gumbel":
            soft_mask, soft_scale = _perturb(attn_mask, noise, temperature), scale / temperature
        mean = scaled_dot_product_attention(query, key, value.detach(), soft_mask, scale=soft_scale)
        out = out + (mean - mean.detach())  # the value of out with the derivative of mean
    results = [out]
    if estimator == "reinforce":
        results.append(_log_prob(query, key, attn_mask, scale, index, visible, dtype))
    if need_weights:
        one_hot = torch.zeros(scores, dtype=query.dtype, device=query.device)
        if index is not None:
            one_hot = one_hot.scatter(-1, index[..., None], visible[..., None].to(query.dtype))
        results.append(torch.where(is_nan[..., None], math.nan, one_hot))
    return tuple(results) if len(results) > 1 else out


def _log_prob(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    index: Tensor | None,  # [..., L], of the chosen keys; None without keys
    visible: Tensor,  # [..., L], False for fully masked rows
    dtype: torch.dtype,
) -> Tensor:
    """Return log p of the chosen keys: their score minus the log-sum-exp of all scores."""
    if index is None:
        return visible.to(dtype)
    columns = key.new_zeros(1).expand(*key.shape[:-1], 1)
    lse = scaled_dot_product_attention(query, key, columns, mask, scale=scale, return_lse=True)[1]
    chosen_rows = key.gather(-2, index[..., None].expand(*index.shape, key.shape[-1]))
    score = scale * (query.to(dtype) * chosen_rows.to(dtype)).sum(-1)
    if mask is not None and mask.dtype != torch.bool:
        full_mask = mask.expand(*query.shape[:-1], key.shape[-2])
        score = score + full_mask.gather(-1, index[..., None]).squeeze(-1).to(dtype)
    return torch.where(visible, score, 0.0) - torch.where(visible, lse.to(dtype), 0.0)


def _perturb(mask: Tensor | None, noise: Tensor | None, temperature: float = 1.0) -> Tensor | None:
    """Return (mask + noise) / temperature; without noise, a boolean mask stays as it is."""
    if noise is None:
        return mask if mask is None or mask.dtype == torch.bool else mask / temperature
    if mask is None:
        return noise / temperature
    if mask.dtype == torch.bool:
        return torch.where(mask, noise / temperature, -math.inf)
    return (mask + noise) / temperature


def _check(query: Any, key: Any, value: Any, estimator: Any, temperature: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.check_dense(_NAME, **{name: x})
        if x.ndim < 2:
            raise ValueError(f"{_NAME}: {name} must have at least 2 dimensions, got {x.ndim}")
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"{_NAME}: query, key and value must have the same leading dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"{_NAME}: key and value must have the same number of rows, got shapes "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    checks.check_choice(f"{_NAME}: estimator", estimator, _ESTIMATORS)
    checks.check_number(f"{_NAME}: temperature", temperature)
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{_NAME}: temperature must be positive, got {temperature}")
