# The native module, where it was built: addresses, shapes and element strides, see csrc/params.h.
# An operand is (address, strides), None where there is none.
from typing import Any, TypeAlias

Ints: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[int, Ints] | None

def additive_forward(
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Tq, Tk, A, Dv
    operands: tuple[Operand, Operand, Operand],  # query, key, value, with a head of stride 0
    vector: int,
    bias: int,
    options: tuple[Operand, int, bool, float, int],  # mask, its dtype, causal, dropout_p, seed
    results: tuple[Operand, Operand],  # out, weights
    /,
) -> None: ...
def additive_backward(
    dtype: int,
    threads: int,
    sizes: Ints,
    operands: tuple[Operand, Operand, Operand],
    vector: int,
    bias: int,
    options: tuple[Operand, int, bool, float, int],
    given: tuple[Operand, Operand],  # grad_out, grad_weights
    # of query, key, value, v, bias, scores, mask
    results: tuple[Operand, Operand, Operand, int, int, int, Operand],
    parts: tuple[int, int, int, bool],  # workspace, rows of a chunk, chunks, direct
    /,
) -> None: ...
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
    scale: float,
    options: tuple[object, ...] | None,
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
    scale: float,
    options: tuple[object, ...] | None,
    gradients: tuple[Operand, int, Operand, Operand, Operand, Operand, Operand],
    /,
) -> None: ...
def attention_sequences(
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
    scale: float,
    options: tuple[object, ...] | None,
    # q_starts, k_starts, k_lengths, k_batch, block_table, its stride, page_size, entries of the
    # cache, bottom_right
    table: tuple[int, int, int, int, int, int, int, int, bool],
    gradients: tuple[Any, ...] | None,
    /,
) -> None: ...
def append_to_cache(
    element: int,  # bytes
    sizes: Ints,  # B, Hkv, rows, keys of the cache, D, Dv, entries of the cache
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    # k_lengths with the new rows, k_batch, block_table, its stride, page_size
    table: tuple[int, int, int, int, int],
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
    offset: int,
    frequency: int,
    phase: int,
    pairs: int,
    interleaved: bool,
    pair_frequency: int,
    scale: float,
    padding_idx: int | None,
    /,
) -> None: ...
def memory_hops(
    backward: bool,
    dtype: int,
    threads: int,
    sizes: Ints,  # B, Q, K, N, D
    flags: int,
    activation: int,
    scale: float,
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
    scale: float,
    bias_dtype: int,
    operands: tuple[Operand, ...],
    results: Ints,
    settling: Ints,  # queries that rest together, addresses of taken and moved
    eps: float,
    /,
) -> None: ...
def encode_memory(
    dtype: int,
    threads: int,
    sizes: Ints,  # R, G, B, N, J, V, D
    tokens: int,
    token_stride: Ints,
    padding_idx: int | None,
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
    padding_idx: int | None,
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
