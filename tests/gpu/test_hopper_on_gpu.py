"""On compute capability 9.0, attention in 16 bits has two sets of kernels: for Hopper, and for
sm_80, which run if the Hopper kernels are disabled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import PROOFS
from gpu_device import judge

import fastattn
from fastattn import dispatch
from fastattn.testing import Proof

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("there is no GPU of compute capability 9.0 here", allow_module_level=True)
if isinstance(reason := dispatch.load("cuda"), str):
    pytest.skip(f"cuda: {reason}", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.fixture
def without_hopper() -> Iterator[None]:
    """Run without the kernels of Hopper."""
    native: Any = importlib.import_module("fastattn._cuda")
    native.allow_hopper(False)
    yield
    native.allow_hopper(True)


def _ran() -> list[str]:
    """The kernels that a call of attention launches, as the profiler names them."""
    q = torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with fastattn.use_backend("cuda"):
        fastattn.scaled_dot_product_attention(q, q, q)  # the first call may set things up
        with torch.profiler.profile(activities=activities) as profile:
            fastattn.scaled_dot_product_attention(q, q, q)
            torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if "attention_forward" in event.key]


def test_the_kernels_for_hopper_run() -> None:
    ran = _ran()
    assert ["hopper" in kernel for kernel in ran] == [True], ran


def test_sm_80_kernels_run_if_hoppers_are_disabled(without_hopper: None) -> None:
    ran = _ran()
    assert ["hopper" in kernel for kernel in ran] == [False], ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("proof", "case"),
    [
        pytest.param(PROOFS[op], case, id=f"{op}-{case.name}")
        for op in ("scaled_dot_product_attention", "varlen_attention", "decode_attention")
        for case in PROOFS[op].cases
    ],
)
def test_sm_80_kernels_are_right_on_hopper(
    proof: Proof, case: Any, dtype: torch.dtype, without_hopper: None
) -> None:
    judge(proof, case, dtype, "cuda")
