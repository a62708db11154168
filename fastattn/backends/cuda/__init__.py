"""The adapter of the native CUDA module, whose functions take tensors and return new ones.

Every function has the same name and arguments as in ``reference/``; ``docs/design.md`` defines the
primitives. Tests bind the same adapter to a module whose kernels run in an emulator, on CPU tensors
(``tests/emulator``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import _served
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
from fastattn.backends.primitives import unserved

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

INTERPRETED = DEVICE == "cpu"  # the kernels run in an emulator

_OLDEST = (8, 0)  # the first compute capability with all instructions that the kernels need

# What the kernels of an operator, forward and backward, have against a call:
# why_not(**tensors, options=...).
_REASONS: dict[str, Callable[..., list[str]]] = {
    "additive_attention": additive.why_not,
    "append_to_cache": decode.why_not_append,
    "decode_attention": decode.why_not,
    "encode_memory": encoding.why_not,
    "hopfield_retrieve": hopfield.why_not,
    "memory_hop_attention": memory_hops.why_not,
    "merge_states": states.why_not,
    "scaled_dot_product_attention": sdpa.why_not,
    "sinusoidal_encoding": sinusoidal.why_not,
    "varlen_attention": varlen.why_not,
}


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return the reasons why the CUDA kernels cannot run ``op`` on these arguments."""
    given = [tensor for tensor in tensors.values() if tensor is not None]
    for tensor in given:
        if tensor.device.type != DEVICE:
            return [f"a tensor is on {tensor.device}"]
        if tensor.device != given[0].device:
            return [f"tensors are on {given[0].device} and {tensor.device}"]
    op = op.removesuffix("_backward")
    reasons = _why_not_this_device(given[0].device) + unserved(options, _served.CUDA[op])
    return reasons + _REASONS[op](**tensors, options=options)


def _why_not_this_device(device: torch.device) -> list[str]:
    if device.type != "cuda" or not torch.cuda.is_available():  # only `explain` has such tensors
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, c)) for c in (capability, _OLDEST))
        return [f"the GPU has compute capability {found}; the kernels need {oldest}"]
    return []
