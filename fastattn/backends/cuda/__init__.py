"""The adapter of the native CUDA module: from tensors to addresses, shapes, strides and a stream.

Every function has the same name and arguments as in ``reference/``; ``docs/design.md`` defines the
primitives. Tests bind the same adapter to a module whose kernels run in an emulator, on CPU tensors
(``tests/emulator``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.cuda import (
    additive,
    decode,
    hopfield,
    memory_hops,
    sdpa,
    sinusoidal,
    varlen,
)
from fastattn.backends.cuda import encode_memory as encoding
from fastattn.backends.cuda import merge_states as states
from fastattn.backends.cuda.additive import additive_attention, additive_attention_backward
from fastattn.backends.cuda.decode import append_to_cache, decode_attention
from fastattn.backends.cuda.encode_memory import encode_memory, encode_memory_backward
from fastattn.backends.cuda.hopfield import hopfield_retrieve, hopfield_retrieve_backward
from fastattn.backends.cuda.memory_hops import (
    memory_hop_attention,
    memory_hop_attention_backward,
)
from fastattn.backends.cuda.merge_states import merge_states, merge_states_backward
from fastattn.backends.cuda.operands import DEVICE
from fastattn.backends.cuda.sdpa import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from fastattn.backends.cuda.sinusoidal import sinusoidal_encoding
from fastattn.backends.cuda.varlen import varlen_attention, varlen_attention_backward

__all__ = [
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

_OLDEST = (8, 0)  # the first compute capability with all instructions that the kernels need

# For each operator why_not(*tensors, options=...) of its forward pass, and the number of cotangents
# that the backward pass has before the same tensors.
_OPERATORS: dict[str, tuple[Callable[..., list[str]], int]] = {
    "additive_attention": (additive.why_not, 2),
    "append_to_cache": (decode.why_not_append, 0),
    "decode_attention": (decode.why_not, 0),
    "encode_memory": (encoding.why_not, 0),
    "hopfield_retrieve": (hopfield.why_not, 1),
    "memory_hop_attention": (memory_hops.why_not, 2),
    "merge_states": (states.why_not, 2),
    "scaled_dot_product_attention": (sdpa.why_not, 3),
    "sinusoidal_encoding": (sinusoidal.why_not, 0),
    "varlen_attention": (varlen.why_not, 2),
}


def why_not(op: str, *tensors: Tensor | None, options: Any = None) -> list[str]:
    """Return the reasons why the CUDA kernels cannot run ``op`` on these arguments."""
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor in given:
        if tensor.device.type != DEVICE:
            return [f"a tensor is on {tensor.device}"]
        if tensor.device != given[0].device:
            return [f"tensors are on {given[0].device} and {tensor.device}"]
    reasons_of, cotangents = _OPERATORS[op.removesuffix("_backward")]
    first = cotangents if op.endswith("_backward") else 0
    return _why_not_this_device(given[0].device) + reasons_of(*tensors[first:], options=options)


def _why_not_this_device(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, c)) for c in (capability, _OLDEST))
        return [f"the GPU has compute capability {found}; the kernels need {oldest}"]
    return []
