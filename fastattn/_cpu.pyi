# The native module, where it was built: tensors in, new tensors out. Options are read by name; a
# name that is missing is a TypeError, and so is a value of another type.
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from fastattn.backends import primitives

def additive_attention(
    options: primitives.AdditiveOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    /,
) -> tuple[Tensor, Tensor | None]: ...  # out, weights

# The gradients of query, key, value, v, bias and attn_mask.
def additive_attention_backward(
    options: primitives.AdditiveBackwardOptions,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    /,
) -> tuple[Tensor | None, ...]: ...

# Attention reads its tensors and makes its results; (out, lse or None, weights or None).
def attention(
    options: primitives.AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    positions: Tensor | None,
    mask_program: Tensor | None,
    needs_lse: bool,
    /,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...

# The gradients of query, key, value, attn_mask, sinks and relative_bias.
def attention_backward(
    options: primitives.AttentionBackwardOptions,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    positions: Tensor | None,
    mask_program: Tensor | None,
    /,
) -> tuple[Tensor | None, ...]: ...

# The signature of a call (fastattn/call.py); None: it has none.
def signature(tensors: tuple[Any, ...], rows: int, options: tuple[Any, ...], /) -> bytes | None: ...

# How the core reads and makes tensors (csrc/tensors.h, operands.h).
def use_torch(torch: ModuleType, interface: Any, device: str = "cpu") -> bool: ...
def use_rules(new_rows: Callable[..., Tensor], may_round: Callable[[], bool]) -> None: ...
def varlen_attention(
    options: primitives.VarlenOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,  # int64 or int32
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    mask_program: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    /,
) -> tuple[Tensor, Tensor]: ...

# The gradients of query, key, value, sinks and relative_bias.
def varlen_attention_backward(
    options: primitives.VarlenOptions,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    mask_program: Tensor | None,
    /,
) -> tuple[Tensor | None, ...]: ...

# (out, lse); out is float32 where the rows of a quantised cache are read in place.
def decode_attention(
    options: primitives.DecodeOptions,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    mask_program: Tensor | None,
    cache_leftpad: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]: ...
def decodes_on_tiles(
    dtype: int, heads: int, kv_heads: int, queries: int, masked_or_biased: bool, /
) -> bool: ...

# The rotated queries, None without tables.
def append_to_cache(
    options: primitives.AppendOptions,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_positions: Tensor | None,
    query: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    cache_leftpad: Tensor | None,
    /,
) -> Tensor | None: ...

# The rows of each sequence in order, times their scales, for tests.
def gather_rows(
    dtype: int,  # of the results; without scales, of the caches, too
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]: ...
def linear(
    x: Tensor,  # [M, K], K > 0
    weight: Tensor,  # [N, K], rows or columns dense
    bias: Tensor | None,
    /,
) -> Tensor: ...

# A whole layer of a small size; None: the call needs the general path.
def encoder_layer(
    x: Tensor,
    lengths: Sequence[int],
    parts: tuple[Any, ...],
    num_heads: int,
    norm_first: bool,
    rms: bool,
    eps1: float,
    eps2: float,
    activation: int,
) -> Tensor: ...
def self_attention(
    x: Tensor,
    num_heads: int,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    padding: Tensor | None,
    batch_first: bool,
    causal: bool,
    recorded: bool,  # whether gradients are enabled
    /,
) -> Tensor | None: ...

# States of at most four dimensions.
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, /
) -> tuple[Tensor, Tensor]: ...
def merge_states_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def sinusoidal_encoding(
    options: primitives.SinusoidalOptions,
    offset: int,
    x: Tensor,  # of at most four dimensions
    positions: Tensor | None,
    frequency: array[int],  # the columns, see fastattn/sinusoids.py
    phase: array[int],
    pairs: array[int],
    out: Tensor | None,  # dense, of x's sizes and dtype; None: a new one
    /,
) -> Tensor: ...
def memory_hops(
    options: primitives.MemoryHopOptions,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    states: bool,  # return trace and stats
    keeps: bool,  # and what the backward pass can read
    /,
) -> tuple[Any, ...]: ...  # out, trace, stats, weights, kept

# The gradients of query, in_memory, out_memory, hop_proj and of the scores [B, Q, K, N].
def memory_hops_backward(
    options: primitives.MemoryHopBackwardOptions,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    trace: Tensor,
    stats: Tensor,
    kept: Tensor | None,
    /,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...
def hopfield_retrieve(
    options: primitives.HopfieldOptions,
    state: Tensor,  # [G, Q, D] or [B, H, Q, D]
    stored: Tensor,  # [G, N, D] or [B, H, N, D]
    keys: Tensor | None,
    mask: Tensor | None,  # [G|1, Q|1, N|1]
    bias: Tensor | None,
    keeps: bool,  # all states, with their statistics, for the backward pass
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...  # xi, taken, states, stats

# The same numbers of steps again: their states and statistics.
def hopfield_steps(
    options: primitives.HopfieldOptions,
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    taken: Tensor,
    most: int,
    /,
) -> tuple[Tensor, Tensor]: ...

# The gradients of state, of what it is compared with, of stored if that is another, of the scores.
def hopfield_backward(
    options: primitives.HopfieldOptions,
    grad_xi: Tensor,
    state: Tensor,
    stored: Tensor,
    keys: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    taken: Tensor,
    states: Tensor,
    stats: Tensor,
    needed: int,
    /,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
def encode_memory(
    options: primitives.EncodeMemoryOptions,
    tokens: Tensor,
    weight: Tensor,
    factors: Tensor,
    temporal: Tensor | None,
    /,
) -> Tensor: ...  # [R, B, G, N, D], without the R and G that tokens and tables lack

# The gradients of weight and temporal, in the accumulator's dtype.
def encode_memory_backward(
    options: primitives.EncodeMemoryBackwardOptions,
    grad: Tensor,
    tokens: Tensor,
    factors: Tensor,
    /,
) -> tuple[Tensor, Tensor | None]: ...
def local_attention(
    options: primitives.LocalOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    factor: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]: ...  # out, weights

# The gradients of query, key, value and positions.
def local_attention_backward(
    options: primitives.LocalOptions,
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    factor: Tensor | None,
    weights: Tensor,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def build_info() -> dict[str, Any]: ...

# A name, then the dtypes that use another one: avx512_bf16,bfloat16=avx512
def set_isa(spelled: str, /) -> None: ...

# Without effect after set_isa, or under FASTATTN_CPU_ISA
def set_default_isa(spelled: str, /) -> None: ...
def on_tiles(dtype: int) -> bool: ...
def pays_on_tiles(dtype: int, queries: int, keys: int, columns: int) -> bool: ...
def set_all_sizes_on_tiles(all: bool) -> bool: ...
def measure_peak(kind: str, threads: int, seconds: float = 0.1) -> float: ...
def processor() -> dict[str, Any]: ...  # vendor, family, model, brand, features
def usable_features(  # see csrc/cpu/processor.h
    *,
    leaf1_ecx: int,
    leaf7_ebx: int,
    leaf7_ecx: int,
    leaf7_edx: int,
    leaf7_1_eax: int,
    xcr0: int,
    tiles_allowed: bool,
) -> list[str]: ...
def why_no_tiles(type: str, *, leaf7_edx: int, leaf7_1_eax: int, xcr0: int, error: int) -> str: ...
