"""The native CUDA module as a backend; most of its functions are primitives already.

Every function has the same name and arguments as in ``reference/``; ``docs/design.md`` defines the
primitives. Lengths, pages, entries and starts of sequences stay on the GPU, so the host never waits
for them. Invalid ones raise no error, but the kernels never access memory outside the tensors.
Tests bind the same adapter to a module whose kernels run in an emulator, on CPU tensors
(``tests/emulator``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._hopfield import make_backward_of_steps
from fastattn.backends._sinusoidal import encoding_on
from fastattn.backends._states import of_any_rank
from fastattn.backends.cuda import encode_memory as encoding
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import DEVICE, launched
from fastattn.backends.cuda.reasons import REASONS
from fastattn.backends.primitives import EVERYWHERE, unserved

INTERPRETED = DEVICE == "cpu"  # the kernels run in an emulator

_OLDEST = (8, 0)  # the first compute capability with all instructions that the kernels need

additive_attention = launched(_cuda.additive_attention)
additive_attention_backward = launched(_cuda.additive_attention_backward)
append_to_cache = launched(_cuda.append_to_cache)
decode_attention = launched(_cuda.decode_attention)
encode_memory = launched(_cuda.encode_memory)
encode_memory_backward = encoding.encode_memory_backward
hopfield_retrieve = launched(_cuda.hopfield_retrieve)
hopfield_retrieve_backward = make_backward_of_steps(
    launched(_cuda.hopfield_steps), launched(_cuda.hopfield_backward)
)
memory_hop_attention = launched(_cuda.memory_hop_attention)
memory_hop_attention_backward = launched(_cuda.memory_hop_attention_backward)
merge_states = of_any_rank(launched(_cuda.merge_states))
merge_states_backward = of_any_rank(launched(_cuda.merge_states_backward))
scaled_dot_product_attention = sdpa.scaled_dot_product_attention
scaled_dot_product_attention_backward = sdpa.scaled_dot_product_attention_backward
sinusoidal_encoding = encoding_on(launched(_cuda.sinusoidal_encoding))
varlen_attention = launched(_cuda.varlen_attention)
varlen_attention_backward = sdpa.varlen_attention_backward


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return the reasons why the CUDA kernels cannot run ``op`` on these arguments."""
    given = [tensor for tensor in tensors.values() if tensor is not None]
    for tensor in given:
        if tensor.device.type != DEVICE:
            return [f"a tensor is on {tensor.device}"]
        if tensor.device != given[0].device:
            return [f"tensors are on {given[0].device} and {tensor.device}"]
    op = op.removesuffix("_backward")
    reasons = _why_not_this_device(given[0].device) + unserved(options, EVERYWHERE[op])
    return reasons + REASONS[op](**tensors, options=options)


def _why_not_this_device(device: torch.device) -> list[str]:
    if device.type != "cuda" or not torch.cuda.is_available():  # only `explain` has such tensors
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, c)) for c in (capability, _OLDEST))
        return [f"the GPU has compute capability {found}; the kernels need {oldest}"]
    return []
