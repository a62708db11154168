"""The reasons of each operator's kernels, forward and backward, against a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda.operands import INFO
from fastattn.backends.primitives import MemoryHopOptions

_MAX_LENGTH = 2**30  # kMaxLength in csrc/cuda/params.h
_MAX_WIDTH: int = INFO["widths"][-1]
_MAX_HOP_WIDTH: int = _cuda.max_hop_width
_MAX_SENTENCE_WIDTH = 8192  # a block's sums, [4, D] floats, fit in shared memory
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _why_not_dtype(x: Tensor, *_: Any, **__: Any) -> list[str]:
    if x.dtype in _DTYPES:
        return []
    return [f"the dtype {x.dtype} is not one of float32, bfloat16, float16"]


def _why_not_mask(attn_mask: Tensor | None) -> list[str]:
    if attn_mask is None or attn_mask.dtype in (torch.bool, *_DTYPES):
        return []
    return [f"the mask's dtype {attn_mask.dtype} is not bool, float32, bfloat16 or float16"]


def _why_not_additive(
    query: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> list[str]:
    reasons = _why_not_dtype(query) + _why_not_mask(attn_mask)
    if max(*query.shape, *value.shape[1:]) > _MAX_LENGTH:
        reasons.append(f"a size is greater than {_MAX_LENGTH}")
    return reasons


def _why_not_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> list[str]:
    reasons = _why_not_dtype(query) + _why_not_mask(attn_mask)
    width = max(query.shape[-1], value.shape[-1])
    if width > _MAX_WIDTH:
        reasons.append(f"a head has {width} columns; the kernels take up to {_MAX_WIDTH}")
    if max(*query.shape[:3], key.shape[2]) > _MAX_LENGTH:
        reasons.append(f"a size is greater than {_MAX_LENGTH}")
    if relative_bias is not None and relative_bias.shape[2] // 2 > _MAX_LENGTH:
        reasons.append(f"a distance of relative_bias is greater than {_MAX_LENGTH}")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        reasons.append("alibi_slopes requires a gradient, which the kernel does not compute")
    return reasons


def _why_not_packed(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> list[str]:
    # Not [None], which fails for `explain` if PyTorch was built without this kind of device.
    tensors_4d = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return _why_not_attention(*tensors_4d, **others)


def _why_not_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, **others: Any
) -> list[str]:
    reasons = _why_not_attention(query, key_cache, value_cache, **others)
    return reasons + _why_not_capacity(key_cache, **others)


def _why_not_append(key_cache: Tensor, **others: Any) -> list[str]:
    return _why_not_dtype(key_cache) + _why_not_capacity(key_cache, **others)


def _why_not_capacity(cache: Tensor, block_table: Tensor | None = None, **_: Any) -> list[str]:
    """Reasons against the number of keys in an entry, or in a row of the block table."""
    capacity = cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    if capacity > _MAX_LENGTH or cache.shape[0] > _MAX_LENGTH:
        return [f"the cache has more than {_MAX_LENGTH} keys of a sequence, or entries"]
    return []


def _why_not_encoding(
    weight: Tensor | None = None, grad: Tensor | None = None, **_: Any
) -> list[str]:
    x = grad if weight is None else weight  # the backward pass has no weight
    assert x is not None
    reasons = _why_not_dtype(x)
    if (width := x.shape[-1]) > _MAX_SENTENCE_WIDTH:
        reasons.append(
            f"a memory has {width} columns; the kernels take up to {_MAX_SENTENCE_WIDTH}"
        )
    return reasons


def _why_not_hops(
    query: Tensor, in_memory: Tensor, *, options: MemoryHopOptions, **_: Any
) -> list[str]:
    reasons = _why_not_dtype(query)
    width = query.shape[-1]
    if width > _MAX_HOP_WIDTH:
        reasons.append(f"a memory has {width} columns; the kernels take up to {_MAX_HOP_WIDTH}")
    if max(query.shape[:-1].numel() * (options.hops + 1), in_memory.shape[-2]) > _MAX_LENGTH // 2:
        reasons.append(f"the queries times hops, or the rows, are more than {_MAX_LENGTH // 2}")
    return reasons


def _why_not_retrieval(state: Tensor, stored: Tensor, **_: Any) -> list[str]:
    return _why_not_hops(state, stored, options=MemoryHopOptions())


# why_not(**tensors, options=...)
REASONS: dict[str, Callable[..., list[str]]] = {
    "additive_attention": _why_not_additive,
    "append_to_cache": _why_not_append,
    "decode_attention": _why_not_decode,
    "encode_memory": _why_not_encoding,
    "hopfield_retrieve": _why_not_retrieval,
    "memory_hop_attention": _why_not_hops,
    "merge_states": lambda out_a, **_: _why_not_dtype(out_a),
    "scaled_dot_product_attention": _why_not_attention,
    "sinusoidal_encoding": _why_not_dtype,
    "varlen_attention": _why_not_packed,
}
