# The native module, if it was built. The functions of primitives have the signature of a backend's
# function: the tensors of the operator in order, and by keyword the record of options, whose fields
# are read by name. A missing name, or a value of another type, is a TypeError. They return new
# tensors, and None for absent results.
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

# The primitives, under the names of their operators. Further keyword arguments: `only_first` of
# attention and memory hops returns only the first result; `keeps` of memory hops and Hopfield
# retrieval also returns the last tensors of the backward pass; the encoding has `columns`,
# `offset` and `out`.
def __getattr__(name: str) -> Callable[..., Any]: ...

append_to_cache: Callable[..., Any]
hopfield_backward: Callable[..., Any]  # of the steps; by name also `needed`
hopfield_steps: Callable[..., Any]  # repeats `taken` steps, at most `most`: states, statistics
pack_weight: Callable[..., Any]  # for `packed` of linear; see csrc/cpu/bind_linear.cpp
self_attention: Callable[..., Any]  # of a small layer, or None; see csrc/cpu/bind_linear.cpp
table_layer: Callable[..., Any]  # or None; see csrc/cpu/bind_table_layer.cpp

# Layers of an encoder on rows without padding, embeddings and layers of texts, and their plans:
# csrc/cpu/bind_encoder.cpp, facts.h.
encoder_layers: Callable[..., Any]
encode_texts: Callable[..., Any]
EncoderPlan: Callable[..., Any]
TextPlan: Callable[..., Any]
Facts: Callable[..., Any]

# Whether each is None or has strided memory on the CPU, as fastattn.compat.runs_eagerly() demands.
def are_plain(*tensors: Tensor | None) -> bool: ...

# 64 bits that change with any bit of a dense tensor; None for another one.
def fingerprint(x: Tensor, /) -> int | None: ...

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

# Ignored after set_isa, or if FASTATTN_CPU_ISA is set
def set_default_isa(spelled: str, /) -> None: ...
def on_tiles(dtype: int) -> bool: ...
def has_tiles(dtype: int) -> bool: ...
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
