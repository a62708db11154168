"""Modules: drop-in replacements for those of ``torch.nn``, on fused kernels."""

from fastattn.nn.additive import AdditiveAttention, BahdanauAttention
from fastattn.nn.memn2n import MemN2N, insert_empty_memories
from fastattn.nn.mha import MultiheadAttention
from fastattn.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding

__all__ = [
    "AdditiveAttention",
    "BahdanauAttention",
    "LearnedPositionalEncoding",
    "MemN2N",
    "MultiheadAttention",
    "SinusoidalPositionalEncoding",
    "insert_empty_memories",
]
