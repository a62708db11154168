# The native module, where it was built: addresses, shapes and element strides, see csrc/params.h.
# An operand is (address, strides), None where there is none. Options and the dicts of operands are
# read by name; a name that is missing is a TypeError, and so is a value of another type.
from typing import Any, TypeAlias

from fastattn.backends import primitives

Ints: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[int, Ints] | None
Operands: TypeAlias = dict[str, Any]

def additive_forward(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Tq, Tk, A, Dv
    options: primitives.AdditiveOptions,
    operands: Operands,  # query, key, value (with a head of stride 0), vector, bias, mask, ...
    results: Operands,  # out, applied
    /,
) -> None: ...
def additive_backward(
    dtype: int,
    threads: int,
    sizes: Ints,
    options: primitives.AdditiveOptions,
    operands: Operands,
    gradients: Operands,  # given and written, and the workspace
    /,
) -> None: ...

# Of options, the scale alone stands for a record of defaults.
def attention_forward(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Hq, Hkv, Lq, Lk, D, Dv
    q: int,
    q_stride: Ints,
    k: int,
    k_stride: Ints,
    v: int,
    v_stride: Ints,
    out: int,
    out_stride: Ints,
    lse: int,
    options: primitives.AttentionOptions | float,
    operands: Operands | None,  # mask, mask_dtype, alibi, alibi_stride, seed, applied
    /,
) -> None: ...
def attention_backward(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Hq, Hkv, Lq, Lk, D, Dv
    q: int,
    q_stride: Ints,
    k: int,
    k_stride: Ints,
    v: int,
    v_stride: Ints,
    out: int,
    out_stride: Ints,
    lse: int,
    options: primitives.AttentionOptions | float,
    operands: Operands | None,
    gradients: Operands,  # grad_out, grad_lse, grad_weights, grad_query, ..., grad_mask
    /,
) -> None: ...
def varlen_attention(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Hq, Hkv, Lq, Lk, D, Dv
    q: int,
    q_stride: Ints,
    k: int,
    k_stride: Ints,
    v: int,
    v_stride: Ints,
    out: int,
    out_stride: Ints,
    lse: int,
    options: primitives.VarlenOptions,
    operands: Operands,  # mask, mask_dtype, alibi, alibi_stride, seed
    q_starts: int,
    k_starts: int,
    gradients: Operands | None,  # None: the forward pass
    /,
) -> None: ...
def decode_attention(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Hq, Hkv, Lq, Lk, D, Dv
    q: int,
    q_stride: Ints,
    k: int,
    k_stride: Ints,
    v: int,
    v_stride: Ints,
    out: int,
    out_stride: Ints,
    lse: int,
    options: primitives.DecodeOptions,
    operands: Operands,  # mask, mask_dtype, alibi, alibi_stride, seed
    cache: Operands,  # lengths, entries, block_table, block_table_stride, page_size
    cache_entries: int,
    /,
) -> None: ...
def append_to_cache(
    element: int,  # bytes
    sizes: Ints,  # B, Hkv, rows, keys of the cache, D, Dv, entries of the cache
    key: int,
    key_stride: Ints,
    value: int,
    value_stride: Ints,
    key_cache: int,
    key_cache_stride: Ints,
    value_cache: int,
    value_cache_stride: Ints,
    cache: Operands,  # lengths with the new rows, the others as above
    /,
) -> None: ...
def linear(
    dtype: int,
    threads: int,
    sizes: Ints,  # M, N, K
    x: int,
    x_stride: Ints,
    w: int,
    w_stride: int,
    w_transposed: bool,
    bias: int,
    y: int,
    /,
) -> None: ...
def self_attention(
    dtype: int,
    threads: int,
    sizes: Ints,  # N, L, E, H
    row_steps: Ints,
    x: int,
    w_in: int,
    w_in_stride: int,
    b_in: int,
    w_out: int,
    w_out_stride: int,
    b_out: int,
    padding: int,
    padding_stride: Ints,
    causal: bool,
    out: int,
    /,
) -> None: ...
def merge_states(
    dtypes: tuple[int, int],  # of outputs, of lse
    threads: int,
    sizes: Ints,  # B, H, L, D
    states: tuple[Operand, ...],  # out_a, lse_a, out_b, lse_b; lse as [B, H, L, 1]
    results: tuple[Operand, ...],  # out, lse
    /,
) -> None: ...
def merge_states_backward(
    dtypes: tuple[int, int],
    threads: int,
    sizes: Ints,
    given: tuple[Operand, ...],  # grad_out, grad_lse
    states: tuple[Operand, ...],
    results: tuple[Operand, ...],  # the gradients of the states
    /,
) -> None: ...
def sinusoidal(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, H, L, D
    x: int,
    x_stride: Ints,
    out: int,
    out_stride: Ints,
    positions: int,
    position_stride: Ints,
    frequency: int,
    phase: int,
    pairs: int,
    interleaved: bool,
    pair_frequency: int,
    options: primitives.SinusoidalOptions,
    /,
) -> None: ...
def memory_hops(
    backward: bool,
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Q, K, N, D
    flags: int,
    options: primitives.MemoryHopOptions | float,  # the scale alone: the others are defaults
    bias_dtype: int,
    operands: tuple[Operand, ...],
    results: Ints,
    slots: Ints,  # memories in in_memory and out_memory, projections
    /,
) -> None: ...
def hopfield_steps(
    backward: bool,
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Q, K, N, D
    flags: int,
    options: primitives.HopfieldOptions,
    bias_dtype: int,
    operands: tuple[Operand, ...],
    results: Ints,
    taken: int,
    moved: int,
    /,
) -> None: ...
def encode_memory(
    dtype: int,
    threads: int,
    sizes: Ints,  # R, G, B, N, J, V, D
    tokens: int,
    token_stride: Ints,
    options: primitives.EncodeMemoryOptions,
    factors: int,
    factor_stride: int,
    weight: int,
    weight_stride: Ints,
    temporal: int,
    temporal_stride: Ints,
    out: int,
    /,
) -> None: ...
def encode_memory_backward(
    dtype: int,
    threads: int,
    sizes: Ints,  # R, G, B, N, J, V, D
    tokens: int,
    token_stride: Ints,
    options: primitives.EncodeMemoryBackwardOptions,
    factors: int,
    factor_stride: int,
    grad: int,
    grad_stride: Ints,
    grad_weight: int,
    grad_temporal: int,
    /,
) -> None: ...
def local_attention(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Lq, Lk, D, Dv, W
    operands: tuple[Any, ...],  # query, key, value: (address, (stride of batch, stride of row))
    first: int,
    seen: int,
    factor: int,
    weights: int,
    out: int,
    /,
) -> None: ...
def local_attention_backward(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Lq, Lk, D, Dv, W
    operands: tuple[Any, ...],  # query, key, value: (address, (stride of batch, stride of row))
    first: int,
    seen: int,
    factor: int,
    weights: int,
    grad_out: tuple[Any, ...] | None,
    grad_weights: int,
    grads: Ints,  # of query, key, value and factor; 0: not wanted
    coefficients: int,
    /,
) -> None: ...
def build_info() -> dict[str, Any]: ...

# A name, then the dtypes that use another one: avx512_bf16,bfloat16=avx512
def set_isa(spelled: str, /) -> None: ...

# Without effect after set_isa, or under FASTATTN_CPU_ISA
def set_default_isa(spelled: str, /) -> None: ...
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
