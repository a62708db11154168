"""Memory hops on Triton: the table of cases."""

from __future__ import annotations

import pytest
import torch

from fastattn.testing import Target
from fastattn.testing.memory_hop_cases import HOP_CASES, HopCase, check_hops

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = [case for case in HOP_CASES if case.rows * case.batch * (case.queries or 1) < 1000]
WORK = [
    pytest.param(case, DTYPES[n % 3], id=f"{case}-{DTYPES[n % 3]}") for n, case in enumerate(FEW)
]


@pytest.mark.parametrize(("case", "dtype"), WORK)
def test_case(case: HopCase, dtype: torch.dtype) -> None:
    verdict = check_hops(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", HOP_CASES, ids=str)
def test_case_in_every_dtype(case: HopCase) -> None:
    for dtype in DTYPES:
        verdict = check_hops(case, dtype, Target("triton"))
        assert verdict.ok, f"{dtype}: {verdict.faults}"
