"""Modules: drop-in replacements for those of ``torch.nn``, on fused kernels."""

from fastattn.nn.additive import AdditiveAttention, BahdanauAttention
from fastattn.nn.memn2n import MemN2N, insert_empty_memories
from fastattn.nn.mha import MultiheadAttention
from fastattn.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from fastattn.nn.seq2seq import Transformer
from fastattn.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "AdditiveAttention",
    "BahdanauAttention",
    "LearnedPositionalEncoding",
    "MemN2N",
    "MultiheadAttention",
    "SinusoidalPositionalEncoding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "insert_empty_memories",
]
