"""Hopfield retrieval: memory hops with H = 0, of which the last is the readout."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import MemoryHopOptions
from naive.memory_hops import memory_hop_attention

__all__ = ["hopfield_retrieve"]


def hopfield_retrieve(
    state: Tensor,  # [B, H, L, D]; in float64, all finite
    stored: Tensor,  # [B|1, H, N, D]
    projection: Tensor | None,
    beta: float | Tensor,
    attn_mask: Tensor | None,
    steps: int,
    derivative: str,
    grad: Tensor,
) -> dict[str, Tensor]:
    """Return out and the gradient of every argument, by name, in float64.

    The implicit derivative is that of many steps from the fixed point.
    """
    lead, (rows, width) = state.shape[:2], stored.shape[2:]

    def flat(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[2:]).flatten(0, 1)

    scale, factor = 1.0, torch.ones(1, 1, 1, 1).double()
    if isinstance(beta, Tensor):
        factor = beta.view(1, -1, 1, 1)
    else:
        scale = beta
    keys, value = stored * factor, stored if projection is None else projection
    full = None
    if attn_mask is not None:
        full = flat(attn_mask.expand(*lead, state.shape[2], rows)).unsqueeze(2)
    boolean = full is not None and full.dtype == torch.bool

    def hops(state: Tensor, count: int, read: Tensor) -> dict[str, Tensor]:
        return memory_hop_attention(
            state,
            flat(keys).unsqueeze(1),
            torch.stack([*[flat(stored)] * (count - 1), flat(read)], 1),
            torch.zeros(1, width, width).double(),
            full if boolean else None,
            None if boolean else full,
            MemoryHopOptions(count, scale=scale),
            flat(grad),
            None,
        )

    first = flat(state)
    found = hops(first, steps + 1, value)
    if derivative != "unroll":
        before = hops(first, steps - 1, stored)["out"] if steps > 1 else first
        derived = hops(before, 2 if derivative == "one_step" else 150, value)
        found = derived | {"out": found["out"], "grad_query": torch.zeros_like(first)}

    def of(x: Tensor, like: Tensor) -> Tensor:
        """Sum over the dimensions that ``like`` does not have or broadcasts."""
        return x.unflatten(0, lead).sum_to_size(like.shape)

    by_key, by_row = found["grad_in_memory"][:, 0], found["grad_out_memory"]
    by_step, read = by_row[:, :-1].sum(1), by_row[:, -1]
    grad_stored = by_step + flat(factor.expand(keys.shape)) * by_key
    results = {
        "out": found["out"].unflatten(0, lead),
        "grad_state": found["grad_query"].unflatten(0, lead),
        "grad_stored": of(grad_stored + read if projection is None else grad_stored, stored),
    }
    if projection is not None:
        results["grad_projection"] = of(read, projection)
    if isinstance(beta, Tensor):
        by_head = (by_key.unflatten(0, lead) * stored).sum((0, 2, 3))
        results["grad_beta"] = by_head if beta.ndim else by_head.sum()
    if attn_mask is not None and not boolean:
        results["grad_attn_mask"] = of(found["grad_memory_bias"].sum(2), attn_mask)
    return results
