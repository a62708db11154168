"""Drop-in replacements for modules of ``torch.nn``, on fused kernels."""

from fastattn.nn import functional as functional
from fastattn.nn._head_network import HeadNetwork
from fastattn.nn.additive import AdditiveAttention, BahdanauAttention
from fastattn.nn.hopfield import Hopfield, HopfieldLayer, HopfieldPooling
from fastattn.nn.linear import Linear
from fastattn.nn.luong import GlobalAttention, LuongAttention
from fastattn.nn.memn2n import MemN2N, insert_empty_memories
from fastattn.nn.memory import KeyValueMemory
from fastattn.nn.mha import MultiheadAttention
from fastattn.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from fastattn.nn.relative_bias import (
    DisentangledBias,
    RelativeBias,
    T5RelativeBias,
    WindowRelativeBias,
)
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
    "DisentangledBias",
    "GlobalAttention",
    "HeadNetwork",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "KeyValueMemory",
    "LearnedPositionalEncoding",
    "Linear",
    "LuongAttention",
    "MemN2N",
    "MultiheadAttention",
    "RelativeBias",
    "SinusoidalPositionalEncoding",
    "T5RelativeBias",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "WindowRelativeBias",
    "insert_empty_memories",
]
