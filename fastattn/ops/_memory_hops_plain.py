"""The fast path of memory hops, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.autograd.memory_hops import hop_attention, hop_attention_backward
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.fast_path import Native, calls_are_open, differentiable

_native = Native("plain_hops", hop_attention)
MOST_HOPS = 65536  # sizes in bytes must fit 64 bits


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
    if type(hops) is not int or not 0 < hops <= MOST_HOPS or type(scale) is not float:
        return None
    if not calls_are_open():
        return None
    number = _native.call(query, in_memory, out_memory, memory_mask, hops)
    if not number:
        return None
    native = _native.found.get(number | 1) or _native.find(
        number | 1, query, in_memory, out_memory, None, None, None, MemoryHopOptions()
    )
    if native is None:
        return None
    call = query, in_memory, out_memory, memory_mask, hops, scale
    if number & 1 and torch.is_grad_enabled():
        return _hop(*call, *native)
    return native[1].plain_hops(*call, False)[0]


def _resume(ctx: Any, grad_out: Tensor, saved: Any, hops: int, scale: float, backend: str) -> Any:
    query, in_memory, out_memory, mask, kept = saved
    batch, width = query.shape
    sizes = batch * (2 * hops + 1) * width, batch * hops * 2
    trace, stats = kept.reshape(-1)[: sum(sizes)].split(sizes)
    states = trace.view(batch, 2 * hops + 1, width), stats.view(batch, hops, 2)
    if mask is not None:
        mask = mask[:, None, None, :]
    seen = (query, in_memory, out_memory, None, mask, None, *states)
    needed = sum(1 << n for n in range(3) if ctx.needs_input_grad[n])
    record = MemoryHopBackwardOptions(hops=hops, scale=scale, needed=needed)
    grads = hop_attention_backward.resume(ctx, (grad_out, None), (*seen, record, backend))
    return grads[:3]


_hop = differentiable("plain_hops", 1, _resume)
