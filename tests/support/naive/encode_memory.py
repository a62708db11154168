"""Memory encoding, one word at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from naive._arrays import array, tensor


def encode_memory(
    tokens: Tensor,  # [B, N, J], 0 is padding
    weight: Tensor,  # [G, V, D]
    factors: Tensor,  # [J, D]
    temporal: Tensor,  # [G, N, D]
) -> Tensor:
    """Return the memories in float64, [B, G, N, D]."""
    tables, rows, f = map(array, (weight, temporal, factors))
    out = np.zeros((len(tokens), *rows.shape), np.longdouble)
    for b, story in enumerate(tokens.tolist()):
        for n, sentence in enumerate(story):
            if any(sentence):
                out[b, :, n] += rows[:, n]
            for j, token in enumerate(sentence):
                if token:
                    out[b, :, n] += f[j] * tables[:, token]
    return tensor(out)
