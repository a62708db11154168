"""The Triton backend: the operators on any GPU that Triton supports; see ``docs/triton.md``.

Every function has the same name and arguments as in ``reference/``. With the environment variable
``TRITON_INTERPRET=1`` the kernels run interpreted on CPU tensors: slow, and meant for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends.triton._launch import INTERPRETED
from fastattn.backends.triton.additive import additive_attention, additive_attention_backward
from fastattn.backends.triton.decode import append_to_cache, decode_attention
from fastattn.backends.triton.encode_memory import encode_memory, encode_memory_backward
from fastattn.backends.triton.hopfield import (
    TOGETHER,
    hopfield_retrieve,
    hopfield_retrieve_backward,
)
from fastattn.backends.triton.memory_hops import (
    memory_hop_attention,
    memory_hop_attention_backward,
)
from fastattn.backends.triton.merge_states import merge_states, merge_states_backward
from fastattn.backends.triton.sdpa import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from fastattn.backends.triton.sinusoidal import sinusoidal_encoding
from fastattn.backends.triton.varlen import varlen_attention, varlen_attention_backward

__all__ = [
    "INTERPRETED",
    "additive_attention",
    "additive_attention_backward",
    "append_to_cache",
    "decode_attention",
    "encode_memory",
    "encode_memory_backward",
    "hopfield_retrieve",
    "hopfield_retrieve_backward",
    "memory_hop_attention",
    "memory_hop_attention_backward",
    "merge_states",
    "merge_states_backward",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "sinusoidal_encoding",
    "varlen_attention",
    "varlen_attention_backward",
    "why_not",
]

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_OLDEST = (8, 0)
_WIDEST = 512
_WIDEST_HOPS = 256  # a program keeps a whole state and its gradient
_FARTHEST = 2**29  # sums of a few positions are int32


def why_not(op: str, *tensors: Any, options: Any = None) -> list[str]:
    """Return the reasons why the Triton kernels cannot run ``op`` on these arguments."""
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if device.type == "cpu" and not INTERPRETED:
        return ["CPU tensors need the interpreter: set TRITON_INTERPRET=1 before Python starts"]
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST:
            return [f"the GPU has compute capability {capability[0]}.{capability[1]}, below 8.0"]
    for tensor in given:
        if tensor.device != device:
            return [f"tensors are on {device} and on {tensor.device}"]
    floating = (tensor.dtype for tensor in given if tensor.is_floating_point())
    # lse and its gradient may be float64 where the outputs are not.
    dtype = tensors[2].dtype if op == "merge_states_backward" else next(floating)
    if dtype not in _FLOATS:
        return [f"the dtype {dtype} is not one of float32, bfloat16, float16"]
    if op.startswith("scaled_dot_product_attention"):
        backward = op.endswith("_backward")
        query, key, value, mask, slopes = tensors[3:8] if backward else tensors[:5]
        assert query is not None
        assert key is not None
        assert value is not None
        return _why_not_attend(query, key, value, mask, slopes, options.offset)
    if op.startswith("varlen_attention"):
        query, key, value, _, _, slopes = tensors[2:8] if op.endswith("_backward") else tensors[:6]
        assert query is not None
        assert key is not None
        assert value is not None
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return _why_not_attend(query, key, value, None, slopes, 0)
    if op == "decode_attention":
        query, key, value, *_, slopes = tensors
        assert query is not None
        assert key is not None
        assert value is not None
        return _why_not_attend(query, key, value, None, slopes, 0)
    if op.startswith("memory_hop_attention"):
        query, *_ = tensors[2:] if op.endswith("_backward") else tensors
        return _why_not_width(query.shape[-1])
    if op.startswith("hopfield_retrieve"):
        state, *_ = tensors[1:] if op.endswith("_backward") else tensors
        reasons = _why_not_width(state.shape[-1])
        if options.together > TOGETHER:
            reasons.append(f"{options.together} queries that stop together are above {TOGETHER}")
        return reasons
    if op.startswith("additive_attention"):
        _, _, value, *_ = tensors[2:] if op.endswith("_backward") else tensors
        if value.shape[2] > _WIDEST:
            return [f"a value dimension of {value.shape[2]} is above {_WIDEST}"]
    return []


def _why_not_width(width: int) -> list[str]:
    return [f"a width of {width} is above {_WIDEST_HOPS}"] if width > _WIDEST_HOPS else []


def _why_not_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    offset: int,
) -> list[str]:
    reasons = []
    if mask is not None and mask.dtype not in _FLOATS | {torch.bool}:
        reasons.append(f"the dtype {mask.dtype} of attn_mask is not float32, bfloat16 or float16")
    if slopes is not None and slopes.requires_grad:
        reasons.append("alibi_slopes requires a gradient, which the kernel does not compute")
    width = max(query.shape[3], value.shape[3])
    if width > _WIDEST:
        reasons.append(f"a head dimension of {width} is above {_WIDEST}")
    if max(query.shape[2], key.shape[2], abs(offset)) > _FARTHEST:
        reasons.append(f"a length or an offset is above {_FARTHEST}")
    return reasons
