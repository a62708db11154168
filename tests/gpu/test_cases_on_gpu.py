"""The case tables on a GPU, on each backend that is there for one: `python -m pytest tests/gpu`.

The inputs are those of the CPU's tests, copied to the GPU before each call; so is the bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import ATTENTION_CASES, PROOFS
from gpu_device import DEVICE, skip_without_gpu
from large_scores import large_scores

from fastattn import dispatch
from fastattn.testing import Case, OnGpu, Proof, check
from fastattn.tune import MEASURED

skip_without_gpu()
pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(params=["cuda", "triton"])
def target(request: pytest.FixtureRequest) -> OnGpu:
    backend = dispatch.load(request.param)
    if isinstance(backend, str):
        pytest.skip(f"{request.param}: {backend}")
    return OnGpu(request.param, device=DEVICE)


def _judge(proof: Proof, case: Any, dtype: torch.dtype, target: OnGpu) -> None:
    if dtype not in case.dtypes:
        pytest.skip("not a case of this dtype")
    verdict = proof(case, dtype, target)
    if verdict.declined:
        pytest.skip("; ".join(verdict.declined))
    assert verdict.ok, "\n".join(verdict.faults)


@dtypes
@pytest.mark.parametrize(
    ("proof", "case"),
    [
        pytest.param(PROOFS[op], case, id=f"{op}-{case.name}")
        for op in (*MEASURED, "append_to_cache")  # those with a kernel for GPUs
        for case in PROOFS[op].cases
    ],
)
def test_case(proof: Proof, case: Any, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(proof, case, dtype, target)


@pytest.mark.parametrize(("case", "dtype"), large_scores(*DTYPES))
def test_large_scores(case: Case, dtype: torch.dtype) -> None:
    """Right where products are summed in one order, forward and backward: `cuda` promises it."""
    if isinstance(reason := dispatch.load("cuda"), str):
        pytest.skip(f"cuda: {reason}")
    _judge(check, case, dtype, OnGpu("cuda", device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention_by_pytorch(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, grads=("out",))  # with a gradient of lse, another backend runs
    _judge(check, case, dtype, OnGpu("torch", device=DEVICE))
