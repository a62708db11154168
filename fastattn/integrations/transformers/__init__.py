"""Models of Hugging Face transformers on fused kernels.

transformers asks two registries, under the name in ``attn_implementation``, for an attention
function and for the function that makes the mask (``AttentionInterface`` and
``AttentionMaskInterface``). :func:`register` adds both; transformers is imported only then.
"""

from __future__ import annotations

from fastattn.integrations.transformers._registry import Registration, register

__all__ = ["Registration", "register"]
