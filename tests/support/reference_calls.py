"""The reference of attention, called with less to write, and inputs for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionBackwardOptions

INF = float("inf")
NAN = float("nan")
PLAIN = AttentionBackwardOptions(scale=1.0, weights=1)
SEED = torch.tensor(-6148914691236517206)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    seed: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.scaled_dot_product_attention(
        q, k, v, mask, slopes, seed, options=replace(PLAIN, **options)
    )


def row(*values: float) -> Tensor:
    """Scores: the [1, 1, 1, n] float64 bias that makes them of zero queries."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


def with_scores(scores: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with given scores: key j has the feature s_j, the only query is 1, value j is e_j."""
    n = scores.shape[-1]
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).view(1, 1, n, n)
    return attend(q, scores.reshape(1, 1, n, 1), v, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)
