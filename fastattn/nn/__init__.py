"""Modules: drop-in replacements for those of ``torch.nn``, on fused kernels."""

from fastattn.nn.mha import MultiheadAttention

__all__ = ["MultiheadAttention"]
