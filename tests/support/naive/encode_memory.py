"""Memory encoding, one word at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from naive._arrays import array, tensor

__all__ = ["encode_memory"]


def encode_memory(
    tokens: Tensor,  # [B, N, J], 0 is padding
    weight: Tensor,  # [G, V, D]
    factors: Tensor,  # [J, D]
    temporal: Tensor,  # [G, N, D]
    grad: Tensor,  # [B, G, N, D]
) -> dict[str, Tensor]:
    """Return out and the gradients of weight and temporal, by name, in float64."""
    tables, rows, f, g = map(array, (weight, temporal, factors, grad))
    out, grad_tables, grad_rows = np.zeros_like(g), np.zeros_like(tables), np.zeros_like(rows)
    for b, story in enumerate(tokens.tolist()):
        for n, sentence in enumerate(story):
            if any(sentence):
                out[b, :, n] += rows[:, n]
                grad_rows[:, n] += g[b, :, n]
            for j, token in enumerate(sentence):
                if token:
                    out[b, :, n] += f[j] * tables[:, token]
                    grad_tables[:, token] += f[j] * g[b, :, n]
    results = {"out": out, "grad_weight": grad_tables, "grad_temporal": grad_rows}
    return {name: tensor(result) for name, result in results.items()}
