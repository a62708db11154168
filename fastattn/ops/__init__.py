"""The operators: one file each, whose docstring is the specification."""

from fastattn.ops.additive import additive_attention
from fastattn.ops.attention_stats import attention_stats
from fastattn.ops.decode import decode_attention
from fastattn.ops.encode_memory import encode_memory
from fastattn.ops.flex import flex_attention
from fastattn.ops.hard import hard_attention
from fastattn.ops.hopfield import hopfield_retrieve
from fastattn.ops.hopfield_energy import hopfield_energy
from fastattn.ops.linear import linear
from fastattn.ops.luong import luong_attention
from fastattn.ops.memory_hops import memory_hop_attention
from fastattn.ops.merge_states import merge_states
from fastattn.ops.sdpa import scaled_dot_product_attention
from fastattn.ops.sinusoidal import sinusoidal_encoding, sinusoidal_table
from fastattn.ops.varlen import varlen_attention

__all__ = [
    "additive_attention",
    "attention_stats",
    "decode_attention",
    "encode_memory",
    "flex_attention",
    "hard_attention",
    "hopfield_energy",
    "hopfield_retrieve",
    "linear",
    "luong_attention",
    "memory_hop_attention",
    "merge_states",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "varlen_attention",
]
