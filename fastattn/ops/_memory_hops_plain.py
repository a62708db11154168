"""The fast path of memory hops, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.autograd.memory_hops import hop_attention, hop_attention_backward
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.checks import DTYPES
from fastattn.fast_path import differentiable, is_open

# dtype -> the name of the native backend and its module.
_native: dict[torch.dtype, tuple[str, Any]] = {}


def hop_plainly(
    query: Any,
    in_memory: Any,
    out_memory: Any,
    memory_mask: Any,
    hops: Any,
    scale: Any,
) -> Tensor | None:
    """Return the result of a call with default options, or None: take the general path.

    Returns None unless query is [B, D], each memory is [B, N, D] or [B, K, N, D] with contiguous
    rows and its own batch dimension, the mask is [B, N], and all arguments are valid.
    """
    if (
        type(hops) is not int
        or hops < 1
        or type(scale) is not float
        or query is None
        or in_memory is None
        or not is_open(query, in_memory, out_memory, memory_mask)
        or query.dim() != 2
        or query.is_nested
    ):
        return None
    dtype, (batch, width) = query.dtype, query.shape
    if width == 0 or not _fits(in_memory, dtype, batch, width, hops + (out_memory is None)):
        return None
    rows = in_memory.shape[-2]
    if out_memory is not None and (
        not _fits(out_memory, dtype, batch, width, hops) or out_memory.shape[-2] != rows
    ):
        return None
    if memory_mask is not None and (
        memory_mask.dtype is not torch.bool or memory_mask.shape != (batch, rows)
    ):
        return None
    native = _native.get(dtype) or _find_native(query, in_memory, out_memory)
    if native is None:
        return None
    call = query, in_memory, out_memory, memory_mask, hops, scale
    if torch.is_grad_enabled() and (
        query.requires_grad
        or in_memory.requires_grad
        or (out_memory is not None and out_memory.requires_grad)
    ):
        return _hop(*call, *native)
    return native[1].plain_hops(*call, False)[0]


def _fits(memory: Tensor, dtype: torch.dtype, batch: int, width: int, hops: int) -> bool:
    if memory.is_nested:
        return False
    shape, strides = memory.shape, memory.stride()
    return (
        memory.dtype is dtype
        and (len(shape) == 3 or (len(shape) == 4 and shape[1] == hops))
        and shape[0] == batch
        and shape[-1] == width
        and strides[-1] == 1
        # A separate kernel handles a memory that all queries share.
        and batch > 1
        and strides[0] != 0
    )


def _resume(ctx: Any, grad_out: Tensor, saved: Any, hops: int, scale: float, backend: str) -> Any:
    query, in_memory, out_memory, mask, trace, stats, _ = saved
    if mask is not None:
        mask = mask[:, None, None, :]
    seen = (query, in_memory, out_memory, None, mask, None, trace, stats)
    needed = sum(1 << n for n in range(3) if ctx.needs_input_grad[n])
    record = MemoryHopBackwardOptions(hops=hops, scale=scale, needed=needed)
    grads = hop_attention_backward.resume(ctx, (grad_out, None), (*seen, record, backend))
    return grads[:3]


_hop = differentiable("plain_hops", 1, _resume)


def _find_native(query: Tensor, in_memory: Tensor, out_memory: Tensor | None) -> Any:
    if query.dtype not in DTYPES:
        return None
    tensors = (query, in_memory, out_memory, None, None, None)
    backend = hop_attention.choose((*tensors, MemoryHopOptions()))
    module: Any = dispatch.load(backend)
    if not hasattr(module, "plain_hops"):
        return None
    _native[query.dtype] = backend, module
    return backend, module
