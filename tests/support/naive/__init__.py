"""An independent implementation of every operator, in NumPy and extended precision.

It shares no code with ``backends/reference/`` (except for the dropout mask, which is integer
arithmetic with known answers), so each checks the other. It is also the only reference that is more
exact than a float64 kernel, if ``numpy.longdouble`` is wider than float64, as on x86.

Packed sequences and decoding are attention for each sequence. Hopfield retrieval is memory hops.
``sinusoidal_encoding`` is not here: ``tests/ops/test_sinusoidal.py`` checks its reference with 50
digits.
"""

from __future__ import annotations

from naive.additive import additive_attention
from naive.append import append_to_cache
from naive.encode_memory import encode_memory
from naive.hopfield import hopfield_retrieve
from naive.luong import luong_attention
from naive.memory_hops import memory_hop_attention
from naive.merge_states import merge_states
from naive.sdpa import scaled_dot_product_attention

__all__ = [
    "additive_attention",
    "append_to_cache",
    "encode_memory",
    "hopfield_retrieve",
    "luong_attention",
    "memory_hop_attention",
    "merge_states",
    "scaled_dot_product_attention",
]
