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
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k = query.detach().to(wide), key.detach().to(wide)
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = (*query.shape[:-1], key.shape[-2])

    # argmax(log p + Gumbel noise) is a sample from p. The noise is passed as an additive mask.
    noise = None
    if not deterministic:
        noise = torch.empty(scores, dtype=wide, device=query.device)
        noise = -torch.log(noise.exponential_(generator=generator))
    chance = _added(attn_mask, noise)
    columns = key.detach().new_zeros(1).to(wide).expand(*key.shape[:-1], 1)
    chance = None if chance is None else chance.detach()
    weights = scaled_dot_product_attention(q, k, columns, chance, scale=scale, need_weights=True)[1]
    if scores[-1] == 0:
        chosen, seen = None, weights.new_zeros(scores[:-1], dtype=torch.bool)
        lost = seen
        out = value.new_zeros((*scores[:-1], value.shape[-1]))
    else:
        most, chosen = weights.max(-1)
        seen, lost = most != 0, most.isnan()
        rows = chosen[..., None].expand(*chosen.shape, value.shape[-1])
        # The product, unlike a selection, also makes the gradient of a NaN row NaN.
        near = value.gather(-2, rows) * torch.where(lost, math.nan, 1.0)[..., None].to(value.dtype)
        out = torch.where(seen[..., None], near, 0.0)

    if estimator != "reinforce":
        soft, heat = attn_mask, 1.0
        if estimator == "gumbel" and noise is not None:
            soft, heat = _added(attn_mask, noise, temperature), temperature
        elif estimator == "gumbel":
            soft, heat = _added(attn_mask, None, temperature), temperature
        mean = scaled_dot_product_attention(query, key, value.detach(), soft, scale=scale / heat)
        out = out + (mean - mean.detach())  # the value of out with the derivative of mean
    results = [out]
    if estimator == "reinforce":
        results.append(_log_prob(query, key, attn_mask, scale, chosen, seen, wide))
    if need_weights:
        one = torch.zeros(scores, dtype=query.dtype, device=query.device)
        if chosen is not None:
            one = one.scatter(-1, chosen[..., None], seen[..., None].to(query.dtype))
        results.append(torch.where(lost[..., None], math.nan, one))
    return tuple(results) if len(results) > 1 else out


def _log_prob(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    chosen: Tensor | None,
    seen: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """log p of the chosen keys: their score minus the log-sum-exp of all scores."""
    if chosen is None:
        return seen.to(dtype)
    columns = key.new_zeros(1).expand(*key.shape[:-1], 1)
    lse = scaled_dot_product_attention(query, key, columns, mask, scale=scale, return_lse=True)[1]
    near = key.gather(-2, chosen[..., None].expand(*chosen.shape, key.shape[-1]))
    score = scale * (query.to(dtype) * near.to(dtype)).sum(-1)
    if mask is not None and mask.dtype != torch.bool:
        full = mask.expand(*query.shape[:-1], key.shape[-2])
        score = score + full.gather(-1, chosen[..., None]).squeeze(-1).to(dtype)
    return torch.where(seen, score, 0.0) - torch.where(seen, lse.to(dtype), 0.0)


def _added(mask: Tensor | None, noise: Tensor | None, temperature: float = 1.0) -> Tensor | None:
    """(mask + noise) / temperature, as an additive mask."""
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
