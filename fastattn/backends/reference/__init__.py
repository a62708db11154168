"""The reference backend: the definition of every primitive in PyTorch.

It is slow. It is differentiable any number of times, runs in any floating dtype on any device, and
works under ``vmap``, ``torch.func`` and ``torch.compile``: no Python branch depends on the values
of a tensor, except in Hopfield retrieval, which counts its steps.

**Excluded pairs contribute nothing**: a pair with s_ij = -inf is left out of every sum, not
multiplied by zero. So NaN and inf in a key or value affect only the queries that can see it, in the
results and in every gradient. A fully masked row has o = 0, w = 0, lse = -inf, and passes no
gradient.

**Precision**: 16-bit inputs are computed in float32 and rounded once, at the end. lse is returned
in float64, see ``docs/design.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastattn.backends.reference._dropout import dropout_keep, philox4x32
from fastattn.backends.reference.additive import additive_attention, additive_attention_backward
from fastattn.backends.reference.decode import append_to_cache, decode_attention, quantise
from fastattn.backends.reference.encode_memory import encode_memory, encode_memory_backward
from fastattn.backends.reference.flex import flex_attention, flex_attention_backward
from fastattn.backends.reference.hopfield import (
    hopfield_retrieve,
    hopfield_retrieve_backward,
    hopfield_states,
)
from fastattn.backends.reference.linear import linear, linear_backward
from fastattn.backends.reference.local_attention import local_attention, local_attention_backward
from fastattn.backends.reference.memory_hops import (
    hop_states,
    memory_hop_attention,
    memory_hop_attention_backward,
)
from fastattn.backends.reference.merge_states import merge_states, merge_states_backward
from fastattn.backends.reference.sdpa import (
    attend,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
)
from fastattn.backends.reference.sinusoidal import sinusoidal_encoding
from fastattn.backends.reference.varlen import varlen_attention, varlen_attention_backward


def why_not(op: str, tensors: Mapping[str, Tensor | None], options: Any) -> list[str]:
    """Return no reasons: this backend runs every call."""
    return []
