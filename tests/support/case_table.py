"""The test of a case table: each case in each dtype on each target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from attention_cases import PROOFS

from fastattn.testing import Target, targets
from fastattn.testing.cases import AnyCase


def within_the_bound(
    op: str, *strength: int, keep: Sequence[str] = ()
) -> Callable[[AnyCase, torch.dtype, Target], None]:
    """The test of all cases of an operator, on the reference too; ``sampled`` takes the rest."""
    # Targets are innermost, so that the results of the oracle are kept for as long as needed.
    everywhere = [
        pytest.param(case, dtype, target, id=f"{case.name}-{str(dtype)[6:]}-{target}")
        for case in PROOFS[op].cases
        if not case.slow
        for dtype in case.dtypes
        for target in [*targets(emulated=True), Target("reference")]
        if target.has_own_kernel(op, dtype)
    ]

    @pytest.mark.sampled(*strength, keep=keep)
    @pytest.mark.parametrize(("case", "dtype", "target"), everywhere)
    def test_case(case: AnyCase, dtype: torch.dtype, target: Target) -> None:
        verdict = PROOFS[op](case, dtype, target)
        assert not verdict.declined, verdict.declined
        assert verdict.ok, "\n".join(verdict.faults)

    found: Callable[[AnyCase, torch.dtype, Target], None] = test_case
    return found
