"""The shortest way for the commonest calls of memory hops.

At the size of the bAbI tasks, 32 queries on 50 rows of 20, the arithmetic of a call takes a tenth
of a millisecond, forward and backward; what PyTorch asks for one differentiable function adds half
of that, and the general way, ``memory_hops.prepare`` and ``library.Operator``, doubles it. Here
plain calls are found first; see ``_sdpa_plain.py`` for the like of attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn.autograd.memory_hops import hop_attention, hop_attention_backward
from fastattn.backends.primitives import MemoryHopBackwardOptions, MemoryHopOptions
from fastattn.checks import DTYPES
from fastattn.eager import has_plain_memory, nothing_watches

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
    """Return the result of a call without other options, or None: ask the general way.

    None, unless query is [B, D], each memory [B, N, D] or [B, K, N, D] with contiguous rows and a
    batch of its own, the mask [B, N], all in plain memory of the CPU, and nothing is wrong.
    """
    if (
        not (type(query) is type(in_memory) is Tensor)
        or (out_memory is not None and type(out_memory) is not Tensor)
        or type(hops) is not int
        or hops < 1
        or type(scale) is not float
        or not nothing_watches()
        or dispatch.forced.get() not in dispatch.SHORT_WAY
        or torch.is_autocast_enabled("cpu")
        or not query.is_cpu
        or query.is_neg()  # a view that promises -x
        or query.dim() != 2
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
        type(memory_mask) is not Tensor
        or memory_mask.dtype is not torch.bool
        or not memory_mask.is_cpu
        or memory_mask.shape != (batch, rows)
    ):
        return None
    try:
        native = _native.get(dtype) or _find_native(query, in_memory, out_memory)
        if native is None:
            return None
        if torch.is_grad_enabled() and (
            query.requires_grad
            or in_memory.requires_grad
            or (out_memory is not None and out_memory.requires_grad)
        ):
            return _hop(query, in_memory, out_memory, memory_mask, hops, scale, *native)
        module = native[1]
        return module.plain_hops(query, in_memory, out_memory, memory_mask, hops, scale)[0]
    except RuntimeError:  # sparse, or another tensor without memory: the long way says it clearly
        return None


def _fits(memory: Tensor, dtype: torch.dtype, batch: int, width: int, hops: int) -> bool:
    shape = memory.shape
    return (
        memory.dtype is dtype
        and memory.is_cpu
        and not memory.is_neg()
        and (len(shape) == 3 or (len(shape) == 4 and shape[1] == hops))
        and shape[0] == batch
        and shape[-1] == width
        and memory.layout is torch.strided
        and memory.stride(-1) == 1
        # One memory for many queries is another kernel's task.
        and batch > 1
        and memory.stride(0) != 0
    )


class _Plain(compat.SingleLevelFunction):
    """Memory hops with a gradient, with the fewest steps."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        in_memory: Tensor,
        out_memory: Tensor | None,
        mask: Tensor | None,
        hops: int,
        scale: float,
        backend: str,
        module: Any,
    ) -> Tensor:
        out, trace, stats = module.plain_hops(query, in_memory, out_memory, mask, hops, scale)
        ctx.save_for_backward(query, in_memory, out_memory, mask, trace, stats)
        ctx.set_materialize_grads(False)
        ctx.call = hops, scale, backend, module
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 8
        query, in_memory, out_memory, mask, trace, stats = ctx.saved_tensors
        hops, scale, backend, module = ctx.call
        wants = ctx.needs_input_grad
        if (
            type(grad_out) is Tensor
            and not torch.is_grad_enabled()
            and nothing_watches()
            and has_plain_memory(grad_out)
        ):
            grads = module.plain_hops_backward(
                grad_out, query, in_memory, out_memory, mask, trace, stats, hops, scale, wants
            )
        else:
            ctx.eager = True
            if mask is not None:
                mask = mask[:, None, None, :]
            seen = (query, in_memory, out_memory, None, mask, None, trace, stats)
            needed = sum(1 << n for n in range(3) if wants[n])
            options = MemoryHopBackwardOptions(hops=hops, scale=scale, needed=needed)
            grads = hop_attention_backward.resume(ctx, (grad_out, None), (*seen, options, backend))
        kept = [grads[n] if wants[n] else None for n in range(3)]
        return *kept, None, None, None, None, None


_hop: Any = _Plain.apply


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
