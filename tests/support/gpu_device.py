"""The device of tests/gpu: a GPU; in a rehearsal the CPU, with kernels that are emulated.

`make gpu-day REHEARSE=1` sets the variable: tests/support/rehearsal then brings the emulated
module, and Triton interprets its kernels.
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
