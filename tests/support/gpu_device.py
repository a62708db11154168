"""The device of tests/gpu: a GPU; in a rehearsal the CPU.

tests/bench/test_gpu_tests.py sets the variable, to test these tests without a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

REHEARSED = "FASTATTN_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSED else "cuda"

needs_gpu = pytest.mark.skipif(REHEARSED, reason="streams, graphs and memory of a real GPU")


def skip_without_gpu() -> None:
    """Skip a whole module where there is no device for it."""
    if not REHEARSED and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here", allow_module_level=True)


def small(n: int) -> int:
    """A size; in a rehearsal a tiny one."""
    return min(n, 40) if REHEARSED else n
