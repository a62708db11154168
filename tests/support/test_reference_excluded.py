"""The reference of attention: excluded pairs, non-finite numbers and empty dimensions."""

from __future__ import annotations

import pytest
import torch
from reference_calls import INF, attend, normal

pytestmark = pytest.mark.without_kernels


def test_opposite_infinities_make_nan() -> None:
    v = torch.tensor([INF, -INF, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    q, k = normal(1, 1, 3, 2), normal(1, 1, 3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool).view(1, 1, 3, 3)
    out = attend(q, k, v, mask)[0].flatten()
    assert out[0].isnan()
    assert out[1:].tolist() == [INF, -INF]


def test_a_key_infinitely_far_away_gets_nothing() -> None:
    """As IEEE has it: q . k is -inf, which is a score like any other."""
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), normal(1, 1, 3, 2)
    k = torch.tensor([0.0, -INF, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    for options in ({}, {"window_right": 2}):
        assert attend(q, k, v, **options)[2].flatten().tolist() == [0.5, 0.0, 0.5]
