"""The arguments that all adapters pass to the native module: dtypes, addresses, strides, stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda

INFO: dict[str, Any] = _cuda.build_info()
DEVICE: str = INFO["device"]  # "cpu" under the emulator
MAX_LENGTH = 2**30  # kMaxLength in csrc/cuda/params.h
DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}
MASK_DTYPES = {**DTYPES, torch.bool: 4}


def operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def broadcast_operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Dimensions of size 1 get stride 0, so nothing is expanded in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tuple([0 if size == 1 else stride for size, stride in pairs])


def biases(
    attn_mask: Tensor | None, alibi_slopes: Tensor | None, shape: tuple[int, ...]
) -> dict[str, Any]:
    """A mask, expanded to [B, Hq, Lq, Lk], and slopes, expanded to [B, Hq], as named operands."""
    alibi = (0, (0, 0)) if alibi_slopes is None else operand(alibi_slopes.expand(shape[:2]))
    return {
        "mask": None if attn_mask is None else operand(attn_mask.expand(shape)),
        "mask_dtype": 0 if attn_mask is None else MASK_DTYPES[attn_mask.dtype],
        "alibi": alibi[0],
        "alibi_stride": alibi[1],
    }


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def why_not_dtype(dtype: torch.dtype) -> list[str]:
    if dtype in DTYPES:
        return []
    return [f"the dtype {dtype} is not one of float32, bfloat16, float16"]


@contextlib.contextmanager
def on(tensor: Tensor) -> Iterator[int]:
    """Make the tensor's device current within the block; yield its current stream as a number."""
    if tensor.device.type != "cuda":
        yield 0
        return
    with torch.cuda.device(tensor.device):
        yield torch.cuda.current_stream(tensor.device).cuda_stream
