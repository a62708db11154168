"""The device of tests/gpu, and the judge of its cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattn import dispatch
from fastattn.testing import OnGpu, Proof

DEVICE = "cuda"


def skip_without_gpu() -> None:
    """Skip a whole module where there is no device for it."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here", allow_module_level=True)


def loaded(backend: str) -> Any:
    """The module of a backend; skips the test if it is missing."""
    if isinstance(module := dispatch.load(backend), str):
        pytest.skip(f"{backend}: {module}")
    return module


def judge(proof: Proof, case: Any, dtype: torch.dtype, backend: str) -> None:
    """Run and judge a case on a backend, unless the backend declines it."""
    loaded(backend)
    if dtype not in case.dtypes:
        pytest.skip("not a case of this dtype")
    verdict = proof(case, dtype, OnGpu(backend, device=DEVICE))
    if verdict.declined:
        pytest.skip("; ".join(verdict.declined))
    assert verdict.ok, "\n".join(verdict.faults)
