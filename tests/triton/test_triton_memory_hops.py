"""Memory hops on Triton: the target of the tests on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattn.testing import OnGpu, Target
from fastattn.testing.memories import HOP_CASES, check_hops

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def test_the_target_of_the_tests_on_a_gpu_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without a GPU: what is copied there and back stays where it is."""
    backend, ran = Target("triton").module, []
    for name in ("memory_hop_attention", "memory_hop_attention_backward"):
        function = getattr(backend, name)

        def noted(*args: Any, function: Any = function, **options: Any) -> Any:
            ran.append(function.__name__)
            return function(*args, **options)

        monkeypatch.setattr(backend, name, noted)
    verdict = check_hops(HOP_CASES[0], torch.float32, OnGpu("triton", device="cpu"))
    assert verdict.ok, verdict.faults
    assert not verdict.declined
    assert set(ran) == {"memory_hop_attention", "memory_hop_attention_backward"}
