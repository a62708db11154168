"""What PyTorch's settings allow the kernels of a GPU to round."""

from __future__ import annotations

import torch


def allows_tf32() -> bool:
    """Whether the factors of float32 products may be rounded to tf32: if PyTorch's own may."""
    matmul = torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        # Since PyTorch 2.9. What was set by this name makes the older ones raise.
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)
