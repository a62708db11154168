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
from fastattn.backends._sinusoidal import make_encoding
from fastattn.backends._states import of_any_rank
from fastattn.backends.cuda import encode_memory as encoding
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import DEVICE, launch_on_stream
from fastattn.backends.cuda.reasons import REASONS
from fastattn.backends.primitives import EVERYWHERE, why_not_options

INTERPRETED = DEVICE == "cpu"  # the kernels run in an emulator

_MIN_CAPABILITY = (8, 0)  # the first compute capability with all instructions that the kernels need

additive_attention = launch_on_stream(_cuda.additive_attention)
additive_attention_backward = launch_on_stream(_cuda.additive_attention_backward)
append_to_cache = launch_on_stream(_cuda.append_to_cache)
decode_attention = launch_on_stream(_cuda.decode_attention)
encode_memory = launch_on_stream(_cuda.encode_memory)
encode_memory_backward = encoding.encode_memory_backward
hopfield_retrieve = launch_on_stream(_cuda.hopfield_retrieve)
hopfield_retrieve_backward = make_backward_of_steps(
    launch_on_stream(_cuda.hopfield_steps), launch_on_stream(_cuda.hopfield_backward)
)
memory_hop_attention = launch_on_stream(_cuda.memory_hop_attention)
memory_hop_attention_backward = launch_on_stream(_cuda.memory_hop_attention_backward)
merge_states = of_any_rank(launch_on_stream(_cuda.merge_states))
merge_states_backward = of_any_rank(launch_on_stream(_cuda.merge_states_backward))
scaled_dot_product_attention = sdpa.scaled_dot_product_attention
scaled_dot_product_attention_backward = sdpa.scaled_dot_product_attention_backward
sinusoidal_encoding = make_encoding(launch_on_stream(_cuda.sinusoidal_encoding))
varlen_attention = launch_on_stream(_cuda.varlen_attention)
varlen_attention_backward = sdpa.varlen_attention_backward


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return the reasons why the CUDA kernels cannot run ``op`` on these arguments."""
    present = [tensor for tensor in tensors.values() if tensor is not None]
    for tensor in present:
        if tensor.device.type != DEVICE:
            return [f"a tensor is on {tensor.device}"]
        if tensor.device != present[0].device:
            return [f"tensors are on {present[0].device} and {tensor.device}"]
    op = op.removesuffix("_backward")
    reasons = _why_not_this_device(present[0].device) + why_not_options(options, EVERYWHERE[op])
    return reasons + REASONS[op](**tensors, options=options)


def _why_not_this_device(device: torch.device) -> list[str]:
    if device.type != "cuda" or not torch.cuda.is_available():  # only `explain` has such tensors
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        actual, required = (".".join(map(str, c)) for c in (capability, _MIN_CAPABILITY))
        return [f"the GPU has compute capability {actual}; the kernels need {required}"]
    return []
