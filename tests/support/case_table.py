"""The tests of a case table: each case in each dtype on each target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fastattn.testing import Target, targets
from fastattn.testing.cases import AnyCase


def each_case(op: str, cases: Iterable[AnyCase], *more: Target) -> Any:
    """Parametrize by case, dtype, and target: those that have a kernel of their own, and more.

    Targets are innermost, so that the results of the oracle are kept for as long as needed.
    """
    everywhere = [
        pytest.param(case, dtype, target, id=f"{case.name}-{str(dtype)[6:]}-{target}")
        for case in cases
        for dtype in case.dtypes
        for target in [*targets(emulated=True), *more]
        if target.has_own_kernel(op, dtype)
    ]
    return pytest.mark.parametrize(("case", "dtype", "target"), everywhere)
