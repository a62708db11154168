"""What all adapters share: what the native module asks of PyTorch, and where a call runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda, compat
from fastattn._version import __version__
from fastattn.backends._alloc import empty_output
from fastattn.backends._precision import allows_tf32

INFO: dict[str, Any] = _cuda.build_info()
DEVICE: str = INFO["device"]  # "cpu" under the emulator
if DEVICE == "cuda" and INFO["version"] != __version__:
    raise ImportError(
        f"the CUDA kernels have version {INFO['version']} and fastattn has {__version__}; they "
        f"must be the same: `pip install fastattn-cuda=={__version__}`, or a build in a checkout"
    )
_cuda.use_torch(torch, compat.exchange_interface, DEVICE)
_cuda.use_rules(empty_output, allows_tf32)
MAX_LENGTH = 2**30  # kMaxLength in csrc/cuda/params.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_dtype(dtype: torch.dtype) -> list[str]:
    if dtype in DTYPES:
        return []
    return [f"the dtype {dtype} is not one of float32, bfloat16, float16"]


def why_not_mask(attn_mask: Tensor | None) -> list[str]:
    if attn_mask is None or attn_mask.dtype in (torch.bool, *DTYPES):
        return []
    return [f"the mask's dtype {attn_mask.dtype} is not bool, float32, bfloat16 or float16"]


def launch(function: Callable[..., Any], of: Tensor, *args: Any) -> Any:
    """Call a native function on the device of a tensor, and on its current stream."""
    with current(of.device) as place:
        return function(*place, *args)


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[tuple[int, int]]:
    """Make a device current within the block; yield its number and its current stream."""
    if device.type != "cuda":  # the emulator
        yield 0, 0
        return
    with torch.cuda.device(device):
        yield device.index, torch.cuda.current_stream(device).cuda_stream
