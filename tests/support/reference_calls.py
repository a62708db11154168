"""The reference of attention, called with less to write, and inputs for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionBackwardOptions

INF = float("inf")
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


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)
