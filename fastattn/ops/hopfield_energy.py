"""The energy that Hopfield retrieval minimizes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import checks
from fastattn.ops.hopfield import check_beta, check_patterns, lift, lift_mask
from fastattn.ops.sdpa import scaled_dot_product_attention

_NAME = "hopfield_energy"
_SMALL_BETA = 1 / 32  # float32 has enough digits for the default beta of up to 1024 columns


def hopfield_energy(
    state: Tensor,
    stored: Tensor,
    *,
    beta: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    r"""Return the energy of each state among the stored patterns.

    .. math:: E = -\beta^{-1} \log \sum_n \exp(\beta x_n \cdot \xi) + \tfrac12 \xi \cdot \xi
              + \beta^{-1} \log N + \tfrac12 \max_n |x_n|^2

    (Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217, equation 2.) A step of
    :func:`fastattn.hopfield_retrieve` never increases it, and
    :math:`\nabla E = \xi - X^T softmax(\beta X \xi)` is minus that step. N and the maximum are
    taken over the patterns that a state can see; the derivative treats them as constants.

    Args:
        state: [B, H, L, D], [B, L, D] or [L, D]; float32, float64, bfloat16 or float16.
        stored: [B, H, N, D], with as many dimensions; B may be 1.
        beta: as for ``hopfield_retrieve``.
        attn_mask: broadcastable to the scores [B, H, L, N]: bool, True takes part, or floating,
            added to the scores.

    Returns:
        [B, H, L], float32 (float64 for float64); inf for a fully masked state. Differentiable any
        number of times in state, stored, beta and the mask.

    Raises:
        TypeError, ValueError: as ``hopfield_retrieve``.

    Examples:
        >>> import torch
        >>> from fastattn import hopfield_energy
        >>> x = torch.eye(2)
        >>> hopfield_energy(x, x, beta=100.0).round(decimals=2)
        tensor([0.0100, 0.0100])
    """
    checks.check_dense(_NAME, state=state, stored=stored)
    patterns = checks.autocast(state, stored)  # as in the attention below
    check_patterns(_NAME, *patterns)
    scale, factor = check_beta(_NAME, beta, state)
    mask = None if attn_mask is None else lift_mask(_NAME, attn_mask, *patterns)
    rank = state.ndim
    state, stored = lift(state), lift(stored)
    dtype = torch.promote_types(state.dtype, torch.float32)
    visible_count, largest_square = _visible_patterns(stored.detach().to(dtype), mask)
    state_squares = state.to(dtype).square().sum(-1)
    # Dividing the difference of two logarithms by a small beta would amplify its rounding error, so
    # the CPU computes it in float64. Kernels for GPUs have no float64.
    needs_float64 = factor is not None or scale < _SMALL_BETA
    lse_dtype = torch.float64 if needs_float64 and state.is_cpu else dtype
    beta = torch.full((), scale, dtype=lse_dtype, device=state.device) if factor is None else factor
    beta = beta.to(lse_dtype).reshape(1, -1, 1)
    if mask is None or mask.dtype == torch.bool:
        beta = _raise_beta(beta, (state_squares.detach() * largest_square).sqrt())
    else:
        mask = mask.to(lse_dtype)
    query, keys = state.to(lse_dtype) * beta[..., None], stored.to(lse_dtype)
    # The output of the attention is not used, so the value has the smallest width, one column.
    value = keys.detach().new_zeros((1, 1, 1, 1)).expand(*keys.shape[:-1], 1)
    lse = scaled_dot_product_attention(query, keys, value, mask, scale=1.0, return_lse=True)[1]
    energy = ((torch.log(visible_count.to(lse_dtype)) - lse) / beta).to(dtype) + largest_square / 2
    energy = energy + state_squares / 2
    energy = torch.where(visible_count == 0, float("inf"), energy)
    return energy if rank == 4 else energy[:, 0] if rank == 3 else energy[0, 0]


def _raise_beta(beta: Tensor, largest: Tensor) -> Tensor:
    """Raise beta [1, H, 1] for each state [B, H, L] whose scores, at most ``largest``, are tiny.

    Up to the raised beta, the second-order term of the energy is below its rounding error, and the
    first-order term, the mean score, does not depend on beta.
    """
    limits = torch.finfo(beta.dtype)
    least = limits.eps**0.5 / largest.to(beta.dtype).clamp(min=limits.tiny**0.5)
    return beta + (least - beta.detach()).clamp(min=0)


def _visible_patterns(stored: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how many patterns each state can see, and their largest squared norm."""
    squares = stored.square().sum(-1).unsqueeze(-2)  # [B|1, H, 1, N]
    count = squares.shape[-1]
    if count == 0:
        zeros = squares.new_zeros(squares.shape[:-1])
        return zeros, zeros
    if mask is None:
        return squares.new_full(squares.shape[:-1], count), squares.amax(-1)
    visible = mask if mask.dtype == torch.bool else mask != -float("inf")
    visible = visible.expand(*visible.shape[:-1], count)
    return visible.sum(-1).to(squares.dtype), torch.where(visible, squares, 0.0).amax(-1)
