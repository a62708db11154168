"""Memory hops on Triton: the table of cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattn.testing import OnGpu, Target
from fastattn.testing.memory_hops import HOP_CASES, HopCase, check_hops

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


def test_the_target_of_the_tests_on_a_gpu_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without a GPU: what is copied there and back stays where it is."""
    backend, ran = Target("triton").module, []
    for name in ("memory_hop_attention", "memory_hop_attention_backward"):
        function = getattr(backend, name)

        def noted(*args: Any, function: Any = function, **options: Any) -> Any:
            ran.append(function.__name__)
            return function(*args, **options)

        monkeypatch.setattr(backend, name, noted)
    verdict = check_hops(FEW[0], torch.float32, OnGpu("triton", device="cpu"))
    assert verdict.ok, verdict.faults
    assert not verdict.declined
    assert set(ran) == {"memory_hop_attention", "memory_hop_attention_backward"}
