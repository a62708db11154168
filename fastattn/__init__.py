"""Fused attention for PyTorch: drop-in for its attention function and its attention module."""

from fastattn import bias, compat, distributed, masks, nn, plot  # noqa: F401  (compat rejects a PyTorch out of range)
from fastattn._capture import capture
from fastattn._trace import trace
from fastattn._version import __version__
from fastattn.dispatch import FallbackWarning, use_backend
from fastattn.explanation import explain
from fastattn.integrations import accelerate, replace_mha, restore, restore_mha
from fastattn.nn import MultiheadAttention
from fastattn.ops import (
    additive_attention,
    attention_stats,
    decode_attention,
    encode_memory,
    hard_attention,
    hopfield_energy,
    hopfield_retrieve,
    luong_attention,
    memory_hop_attention,
    merge_states,
    scaled_dot_product_attention,
    sinusoidal_encoding,
    sinusoidal_table,
    varlen_attention,
)

__all__ = [
    "FallbackWarning",
    "MultiheadAttention",
    "__version__",
    "accelerate",
    "additive_attention",
    "attention_stats",
    "bias",
    "capture",
    "decode_attention",
    "distributed",
    "encode_memory",
    "explain",
    "hard_attention",
    "hopfield_energy",
    "hopfield_retrieve",
    "luong_attention",
    "masks",
    "memory_hop_attention",
    "merge_states",
    "nn",
    "plot",
    "replace_mha",
    "restore",
    "restore_mha",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "trace",
    "use_backend",
    "varlen_attention",
]
