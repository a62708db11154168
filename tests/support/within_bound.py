"""Assertions by the error bound of ``fastattn.testing``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastattn.testing import Noise, deviation
from fastattn.testing.judge import deviations


def assert_within_bound(
    candidate: Tensor,
    reference: Tensor,
    noise: float,
    name: str = "x",
    dtype: torch.dtype | None = None,
) -> float:
    """Raise AssertionError, naming the worst element, unless the bound holds; return the ratio."""
    result = deviation(candidate, reference, noise, name, dtype)
    if not result.ok:
        raise AssertionError(str(result))
    return result.ratio


def assert_right(
    candidates: Mapping[str, Tensor],
    definition: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise AssertionError unless every candidate is within the bound.

    ``definition`` computes the exact values, by the same names, in float64. For float64
    candidates it is not exact enough: pass a reference to :func:`assert_within_bound` instead.
    ``dtype`` is what the candidates were computed in (default: the coarsest of their dtypes).
    """
    exact = {name: x.detach() for name, x in definition().items()}
    assert candidates.keys() == exact.keys(), f"{sorted(candidates)}, want {sorted(exact)}"
    dtype = dtype or max((x.dtype for x in candidates.values()), key=lambda d: torch.finfo(d).eps)
    found = deviations(
        candidates, exact, Noise(definition, exact, dtype), dict.fromkeys(candidates, dtype)
    )
    wrong = [str(d) for d in found if not d.ok]
    assert not wrong, "\n".join(wrong)
