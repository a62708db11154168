# What csrc/cuda/module.cpp and bind_*.cpp define. The functions of primitives are as those of
# _cpu.pyi; by name they also take `place`, the device, which is PyTorch's current one, and the
# stream. Under the emulator there are set_seed, take_launches and take_streams, too.
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

_Primitive: TypeAlias = Callable[..., Any]

max_hop_width: int

additive_attention: _Primitive
additive_attention_backward: _Primitive
append_to_cache: _Primitive
decode_attention: _Primitive
encode_memory: _Primitive
encode_memory_backward: _Primitive
hopfield_backward: _Primitive
hopfield_retrieve: _Primitive
hopfield_steps: _Primitive
memory_hop_attention: _Primitive
memory_hop_attention_backward: _Primitive
merge_states: _Primitive
merge_states_backward: _Primitive
scaled_dot_product_attention: _Primitive
scaled_dot_product_attention_backward: _Primitive
sinusoidal_encoding: _Primitive
varlen_attention: _Primitive
varlen_attention_backward: _Primitive

# How the module reads and makes tensors (csrc/tensors.h, operands.h).
def use_torch(torch: ModuleType, interface: Any, device: str) -> bool: ...
def use_rules(
    new_rows: Callable[..., Tensor],
    summed_to: Callable[..., Tensor],
    may_round: Callable[[], bool],
) -> None: ...
def allow_hopper(allowed: bool, /) -> None: ...
def build_info() -> dict[str, Any]: ...
