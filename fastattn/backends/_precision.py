"""The rounding that PyTorch's settings allow in kernels, and contexts without autocast."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which PyTorch's autocast casts nothing on this kind of device."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def allows_tf32() -> bool:
    """Whether float32 products may be rounded to tf32, as PyTorch's settings say."""
    matmul = torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        # Since PyTorch 2.9. After a setting by this name, the older names raise.
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def allows_bf16_parts() -> bool:
    """Whether float32 products on the CPU may use factors of two bfloat16 parts."""
    if hasattr(torch.backends, "fp32_precision"):
        backend: Any = torch.backends.mkldnn  # type checkers lack some of its attributes
        return bool(backend.matmul.fp32_precision in ("tf32", "bf16"))
    return torch.get_float32_matmul_precision() != "highest"
