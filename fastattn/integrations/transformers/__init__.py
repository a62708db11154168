"""Models of Hugging Face transformers on fused kernels.

transformers looks up the name in ``attn_implementation`` in two registries: one for the attention
function and one for the function that creates the mask (``AttentionInterface`` and
``AttentionMaskInterface``). :func:`register` adds both; transformers is imported only then.
"""

from __future__ import annotations

from fastattn.integrations._registration import Registration
from fastattn.integrations.transformers._compact import CompactBiases, compact_relative_bias
from fastattn.integrations.transformers._registry import (
    context_parallel,
    register,
)

__all__ = [
    "CompactBiases",
    "Registration",
    "compact_relative_bias",
    "context_parallel",
    "register",
]
