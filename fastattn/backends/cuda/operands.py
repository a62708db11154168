"""What all adapters pass to the native module beside addresses and strides: dtypes, a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._version import __version__
from fastattn.backends._operands import address, operand, program_operands, table_operands

INFO: dict[str, Any] = _cuda.build_info()
DEVICE: str = INFO["device"]  # "cpu" under the emulator
if DEVICE == "cuda" and INFO["version"] != __version__:
    raise ImportError(
        f"the CUDA kernels have version {INFO['version']} and fastattn has {__version__}; they "
        f"must be the same: `pip install fastattn-cuda=={__version__}`, or a build in a checkout"
    )
MAX_LENGTH = 2**30  # kMaxLength in csrc/cuda/params.h
DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}
MASK_DTYPES = {**DTYPES, torch.bool: 4}


def optional_operands(
    shape: tuple[int, ...],  # [B, Hq, Lq, Lk], of which a call without a mask needs two
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,  # its last dimension is contiguous
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    mask_workspace: Tensor | None = None,
) -> dict[str, Any]:
    """The operands that a call of attention has, by name; nothing is expanded in memory."""
    operands: dict[str, Any] = {}
    if attn_mask is not None:
        operands["mask"] = operand(attn_mask.expand(shape))
        operands["mask_dtype"] = MASK_DTYPES[attn_mask.dtype]
    for name, of_heads in (("alibi", alibi_slopes), ("sinks", sinks)):
        if of_heads is not None:
            operands[name], operands[f"{name}_stride"] = operand(of_heads.expand(shape[:2]))
    if relative_bias is not None:
        operands |= table_operands(relative_bias, positions)
    if mask_program is not None:
        operands |= program_operands(mask_program)
        operands["mask_workspace"] = address(mask_workspace)
    return operands


def mask_workspace(
    mask_program: Tensor | None,
    shape: Sequence[int],  # B, Hq, Lq, Lk
    packed: bool = False,  # Lq and Lk are the rows of all sequences
) -> Tensor | None:
    """Memory for the steps that a kernel reads from a mask program, and a byte for each tile."""
    if mask_program is None:
        return None
    batch, heads, queries, keys = shape
    size = _cuda.mask_workspace(batch, heads, queries, keys, packed)
    return mask_program.new_empty(size, dtype=torch.uint8)


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
