"""The energy that Hopfield retrieval minimizes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.checks import autocast, check_dense
from fastattn.ops.hopfield import check_beta, check_patterns, lifted, lifted_mask
from fastattn.ops.sdpa import scaled_dot_product_attention

__all__ = ["hopfield_energy"]

_NAME = "hopfield_energy"


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
    check_dense(_NAME, state=state, stored=stored)
    cast = autocast(state, stored)  # as the attention below casts them
    check_patterns(_NAME, *cast)
    scale, factor = check_beta(_NAME, beta, state)
    mask = None if attn_mask is None else lifted_mask(_NAME, attn_mask, *cast)
    rank = state.ndim
    state, stored = lifted(state), lifted(stored)
    wide = torch.promote_types(state.dtype, torch.float32)
    # Below the least normal number all scores are equal, and its inverse would overflow.
    temperature: float | Tensor = 1 / max(scale, torch.finfo(wide).tiny)
    keys = stored
    if factor is not None:
        factor = factor.reshape(1, -1, 1, 1)
        keys, temperature = stored * factor.to(stored.dtype), 1 / factor[..., 0].to(wide)
    # The output of the attention is not used, so the value has the smallest width, one column.
    value = stored.detach().new_zeros((1, 1, 1, 1)).expand(*stored.shape[:-1], 1)
    lse = scaled_dot_product_attention(state, keys, value, mask, scale=scale, return_lse=True)[1]
    seen, longest = _seen(stored.detach().to(wide), mask)
    energy = temperature * (torch.log(seen) - lse) + longest / 2
    energy = energy + state.to(wide).square().sum(-1) / 2
    energy = torch.where(seen == 0, float("inf"), energy)
    return energy if rank == 4 else energy[:, 0] if rank == 3 else energy[0, 0]


def _seen(stored: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many patterns a state can see, and the largest of their squared norms."""
    squares = stored.square().sum(-1).unsqueeze(-2)  # [B|1, H, 1, N]
    count = squares.shape[-1]
    if count == 0:
        none = squares.new_zeros(squares.shape[:-1])
        return none, none
    if mask is None:
        return squares.new_full(squares.shape[:-1], count), squares.amax(-1)
    visible = mask if mask.dtype == torch.bool else mask != -float("inf")
    visible = visible.expand(*visible.shape[:-1], count)
    return visible.sum(-1).to(squares.dtype), torch.where(visible, squares, 0.0).amax(-1)
