# The native module, where it was built. The functions of primitives have the signature of a
# backend's function: the tensors of the operator in their order, and by name the record of options,
# whose fields are read by name; a name that is missing is a TypeError, and so is a value of another
# type. They return new tensors, and None where there is none.
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

_Primitive: TypeAlias = Callable[..., Any]

additive_attention: _Primitive
additive_attention_backward: _Primitive
append_to_cache: _Primitive
decode_attention: _Primitive
encode_memory: _Primitive
encode_memory_backward: _Primitive
hopfield_backward: _Primitive  # of the steps; by name also `needed`
hopfield_retrieve: _Primitive  # `keeps`: return all states, and their statistics
hopfield_steps: _Primitive  # again as many as `taken`, at most `most`: their states and statistics
linear: _Primitive  # (x, weight, bias), with dense rows or columns of the weight
local_attention: _Primitive
local_attention_backward: _Primitive
memory_hop_attention: _Primitive  # `only_first`: return out alone; `keeps`: return `kept`, too
memory_hop_attention_backward: _Primitive  # `kept`
merge_states: _Primitive  # of at most four dimensions
merge_states_backward: _Primitive
scaled_dot_product_attention: _Primitive  # `only_first`
scaled_dot_product_attention_backward: _Primitive
self_attention: _Primitive  # a layer of a small size, or None; see csrc/cpu/bind_linear.cpp
sinusoidal_encoding: _Primitive  # `columns`: see fastattn/sinusoids.py; `offset`, `out`
varlen_attention: _Primitive
varlen_attention_backward: _Primitive

# A layer of an encoder on rows without padding, see csrc/cpu/bind_encoder.cpp.
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
    relative_bias: Tensor | None,
) -> Tensor: ...

# Whether all are plain memory of the CPU, as fastattn.eager.runs_eagerly() demands, or None.
def are_plain(*tensors: Tensor | None) -> bool: ...

# The signature of a call (fastattn/call.py); None: it has none.
def signature(tensors: tuple[Any, ...], rows: int, options: tuple[Any, ...], /) -> bytes | None: ...

# How the core reads and makes tensors (csrc/tensors.h, operands.h).
def use_torch(torch: ModuleType, interface: Any, device: str = "cpu") -> bool: ...
def use_rules(
    new_rows: Callable[..., Tensor],
    summed_to: Callable[..., Tensor],
    may_round: Callable[[], bool],
) -> None: ...
def decodes_on_tiles(
    dtype: int, heads: int, kv_heads: int, queries: int, masked_or_biased: bool, /
) -> bool: ...
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
