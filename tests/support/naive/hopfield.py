"""Hopfield retrieval: memory hops with H = 0, of which the last is the readout."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import MemoryHopOptions
from naive.memory_hops import memory_hop_attention


def hopfield_retrieve(
    state: Tensor,  # [B, H, L, D]; in float64, all finite
    stored: Tensor,  # [B|1, H, N, D]
    projection: Tensor | None,
    beta: float | Tensor,
    attn_mask: Tensor | None,
    steps: int,
) -> Tensor:
    """Return the retrieved states in float64."""
    lead, (rows, width) = state.shape[:2], stored.shape[2:]

    def flat(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[2:]).flatten(0, 1)

    scale, keys = (
        (beta, stored) if not isinstance(beta, Tensor) else (1.0, stored * beta.view(1, -1, 1, 1))
    )
    full = None
    if attn_mask is not None:
        full = flat(attn_mask.expand(*lead, state.shape[2], rows)).unsqueeze(2)
    boolean = full is not None and full.dtype == torch.bool
    out, _ = memory_hop_attention(
        flat(state),
        flat(keys).unsqueeze(1),
        torch.stack(
            [*[flat(stored)] * steps, flat(stored if projection is None else projection)], 1
        ),
        torch.zeros(1, width, width).double(),
        full if boolean else None,
        None if boolean else full,
        options=MemoryHopOptions(steps + 1, scale=scale),
    )
    return out.unflatten(0, lead)
