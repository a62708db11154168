"""The case tables on a GPU, on each GPU backend: `python -m pytest tests/gpu`.

Inputs and bound are the CPU tests'; inputs are copied to the GPU before each call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import GPU_CASES, PROOFS
from gpu_device import judge, skip_without_gpu
from large_scores import large_scores

from fastattn.testing import Case, Proof, check
from fastattn.tune import MEASURED

skip_without_gpu()
pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("proof", "case"),
    [
        pytest.param(PROOFS[op], case, id=f"{op}-{case.name}")
        for op in (*MEASURED, "append_to_cache")  # operators with a GPU kernel
        for case in PROOFS[op].cases
        if getattr(case, "terms", None) is None and getattr(case, "image", None) is None
    ],
)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_case(backend: str, proof: Proof, case: Any, dtype: torch.dtype) -> None:
    judge(proof, case, dtype, backend)


@pytest.mark.parametrize(("case", "dtype"), large_scores(*DTYPES))
def test_large_scores(case: Case, dtype: torch.dtype) -> None:
    """Right where products are summed in one order, forward and backward: `cuda` promises it."""
    judge(check, case, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_attention_by_pytorch(case: Case, dtype: torch.dtype) -> None:
    # With a gradient of lse, another backend runs.
    judge(check, replace(case, grads=("out",)), dtype, "torch")
