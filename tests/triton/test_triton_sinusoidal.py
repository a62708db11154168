"""Sinusoidal encoding on Triton: the table of cases."""

from __future__ import annotations

import pytest
import torch

from fastattn.testing import Target
from fastattn.testing.sinusoidal import SINUSOIDAL_CASES, SinusoidalCase, check_sinusoidal

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORK = [
    pytest.param(case, DTYPES[n % 3], id=f"{case.name}-{DTYPES[n % 3]}")
    for n, case in enumerate(SINUSOIDAL_CASES)
]


@pytest.mark.parametrize(("case", "dtype"), WORK)
def test_case(case: SinusoidalCase, dtype: torch.dtype) -> None:
    verdict = check_sinusoidal(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", SINUSOIDAL_CASES, ids=lambda case: case.name)
def test_case_in_every_dtype(case: SinusoidalCase) -> None:
    for dtype in DTYPES:
        verdict = check_sinusoidal(case, dtype, Target("triton"))
        assert verdict.ok, f"{dtype}: {verdict.faults}"
