"""The device of tests/gpu."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda"


def skip_without_gpu() -> None:
    """Skip a whole module where there is no device for it."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here", allow_module_level=True)
