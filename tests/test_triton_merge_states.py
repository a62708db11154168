"""Merged states of attention on Triton: the table of cases."""

from __future__ import annotations

import pytest
import torch

from fastattn.backends.primitives import NoOptions
from fastattn.testing import Target
from fastattn.testing.merge_states import MERGE_CASES, MergeCase, check_merge

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [case for case in MERGE_CASES if torch.float32 in case.dtypes]
WORK = [
    pytest.param(case, DTYPES[n % 3], id=f"{case.name}-{DTYPES[n % 3]}")
    for n, case in enumerate(CASES)
]


@pytest.mark.parametrize(("case", "dtype"), WORK)
def test_case(case: MergeCase, dtype: torch.dtype) -> None:
    verdict = check_merge(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_in_every_dtype(case: MergeCase) -> None:
    for dtype in DTYPES:
        verdict = check_merge(case, dtype, Target("triton"))
        assert verdict.ok, f"{dtype}: {verdict.faults}"


def test_outputs_in_float64_are_declined_whatever_lse_is() -> None:
    backend = Target("triton").module
    out, lse = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2)
    for op, given in (("merge_states", ()), ("merge_states_backward", (None, lse))):
        (reason,) = backend.why_not(op, *given, out, lse, out, lse, options=NoOptions())
        assert "float64 is not one of" in reason
        args = (*given, out.float(), lse.double(), out.float(), lse.double())
        assert backend.why_not(op, *args, options=NoOptions()) == []
