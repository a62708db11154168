"""The Triton backend: the operators on any GPU that Triton supports; see ``docs/gpu-kernels.md``.

Every function has the same name and arguments as in ``reference/``. With the environment variable
``TRITON_INTERPRET=1`` the kernels run interpreted on CPU tensors: slow, and meant for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import EVERYWHERE, HopfieldOptions, why_not_options
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

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_MIN_CAPABILITY = (8, 0)
_MAX_WIDTH = 512
_MAX_HOP_WIDTH = 256  # a program keeps a whole state and its gradient
_MAX_POSITION = 2**29  # sums of a few positions are int32


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return the reasons why the Triton kernels cannot run ``op`` on these arguments."""
    present = [tensor for tensor in tensors.values() if tensor is not None]
    device = present[0].device
    if device.type == "cpu" and not INTERPRETED:
        return ["CPU tensors need the interpreter: set TRITON_INTERPRET=1 before Python starts"]
    # Without a GPU only `explain` has such tensors.
    if device.type == "cuda" and torch.cuda.is_available() and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return [f"the GPU has compute capability {capability[0]}.{capability[1]}, below 8.0"]
    for tensor in present:
        if tensor.device != device:
            return [f"tensors are on {device} and on {tensor.device}"]
    floating = (tensor.dtype for tensor in present if tensor.is_floating_point())
    # lse and its gradient may be float64 where the outputs are not.
    out_a = tensors.get("out_a")
    dtype = next(floating) if out_a is None else out_a.dtype
    if dtype not in _FLOATS:
        return [f"the dtype {dtype} is not one of float32, bfloat16, float16"]
    op = op.removesuffix("_backward")
    reasons = why_not_options(options, EVERYWHERE[op])
    return reasons + _REASONS[op](**tensors, options=options) if op in _REASONS else reasons


def _why_not_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Any,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """Reasons against any kind of attention, from tensors [B, H, L, D]."""
    reasons = []
    if attn_mask is not None and attn_mask.dtype not in _FLOATS | {torch.bool}:
        dtype = attn_mask.dtype
        reasons.append(f"the dtype {dtype} of attn_mask is not float32, bfloat16 or float16")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        reasons.append("alibi_slopes requires a gradient, which the kernel does not compute")
    width = max(query.shape[3], value.shape[3])
    if width > _MAX_WIDTH:
        reasons.append(f"a head dimension of {width} is above {_MAX_WIDTH}")
    offset = abs(getattr(options, "offset", 0))
    distance = 0 if relative_bias is None else relative_bias.shape[2] // 2
    if max(query.shape[2], key.shape[2], offset, distance) > _MAX_POSITION:
        reasons.append(f"a length, an offset or a distance is above {_MAX_POSITION}")
    return reasons


def _why_not_packed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> list[str]:
    """The reasons of ``_why_not_attend``, from packed tensors [T, H, D]."""
    # Not [None], which fails for `explain` if PyTorch was built without this kind of device.
    tensors_4d = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return _why_not_attend(*tensors_4d, **options)


def _why_not_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any
) -> list[str]:
    """The reasons of ``_why_not_attend``, from caches [E, Hkv, N, D]."""
    return _why_not_attend(query, key_cache, value_cache, **options)


def _why_not_hops(query: Tensor, **_: Any) -> list[str]:
    """Reasons against a state too wide for the registers of a program."""
    width = query.shape[-1]
    return [f"a width of {width} is above {_MAX_HOP_WIDTH}"] if width > _MAX_HOP_WIDTH else []


def _why_not_retrieve(state: Tensor, options: HopfieldOptions, **_: Any) -> list[str]:
    """The reasons of memory hops, and queries that stop together but do not fit a tile."""
    reasons = _why_not_hops(state)
    if options.together > TOGETHER:
        reasons.append(f"{options.together} queries that stop together are above {TOGETHER}")
    return reasons


def _why_not_additive(value: Tensor, **_: Any) -> list[str]:
    """Reasons against a value too wide for a tile."""
    width = value.shape[2]
    return [f"a value dimension of {width} is above {_MAX_WIDTH}"] if width > _MAX_WIDTH else []


_REASONS: dict[str, Callable[..., list[str]]] = {
    "additive_attention": _why_not_additive,
    "decode_attention": _why_not_cache,
    "hopfield_retrieve": _why_not_retrieve,
    "memory_hop_attention": _why_not_hops,
    "scaled_dot_product_attention": _why_not_attend,
    "varlen_attention": _why_not_packed,
}
