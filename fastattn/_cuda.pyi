# What csrc/cuda/module.cpp and bind_*.cpp define: (device, stream, ...) and tensors in, new tensors
# out. The device is PyTorch's current one. Under the emulator there are set_seed, take_launches and
# take_streams, too. Options are read by name; a name that is missing is a TypeError, and so is a
# value of another type.
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

# (device, stream, *arguments); these are listed in csrc/cuda/bind_*.cpp.
_Kernel: TypeAlias = Callable[..., Any]

max_hop_width: int

additive_attention: _Kernel
additive_attention_backward: _Kernel
append_to_cache: _Kernel
attention: _Kernel
attention_backward: _Kernel
decode_attention: _Kernel
encode_memory: _Kernel
encode_memory_backward: _Kernel
hopfield_backward: _Kernel
hopfield_retrieve: _Kernel
hopfield_steps: _Kernel
memory_hops: _Kernel
memory_hops_backward: _Kernel
merge_states: _Kernel
merge_states_backward: _Kernel
sinusoidal_encoding: _Kernel
varlen_attention: _Kernel
varlen_attention_backward: _Kernel

# How the module reads and makes tensors (csrc/tensors.h, operands.h).
def use_torch(torch: ModuleType, interface: Any, device: str) -> bool: ...
def use_rules(new_rows: Callable[..., Tensor], may_round: Callable[[], bool]) -> None: ...
def allow_hopper(allowed: bool, /) -> None: ...
def build_info() -> dict[str, Any]: ...
