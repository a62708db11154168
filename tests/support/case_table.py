"""Tests of tables: the cases of an operator in each dtype on each target, and wrong calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import PROOFS

from fastattn.testing import Target, targets
from fastattn.testing.cases import NamedCase


def within_the_bound(
    op: str, *strength: int, keep: Sequence[str] = ()
) -> Callable[[NamedCase, torch.dtype, Target], None]:
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
    def test_case(case: NamedCase, dtype: torch.dtype, target: Target) -> None:
        verdict = PROOFS[op](case, dtype, target)
        assert not verdict.declined, verdict.declined
        assert verdict.ok, "\n".join(verdict.faults)

    return test_case


def refuses(
    function: Callable[..., Any], table: Iterable[Any], begins: str = "", **defaults: Any
) -> Callable[..., None]:
    """The test of wrong calls: a tuple of arguments, a dict of options or both in turn; the error,
    and words of its message.
    """

    @pytest.mark.parametrize("row", table, ids=lambda row: row[-1])
    def test_errors(row: tuple[Any, ...]) -> None:
        *call, error, message = row
        args = call[0] if isinstance(call[0], tuple) else ()
        options = call[-1] if isinstance(call[-1], dict) else {}
        with pytest.raises(error, match=begins + message):
            function(*args, **{**defaults, **options})

    return test_errors
