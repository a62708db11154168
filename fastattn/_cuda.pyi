# What csrc/cuda/module.cpp and bind_*.cpp define. The functions of primitives are as those of
# _cpu.pyi; by name they also take `place`, the device, which is PyTorch's current one, and the
# stream. Under the emulator there are set_seed, take_launches and take_streams, too.
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastattn._cpu import use_rules as use_rules

def __getattr__(name: str) -> Callable[..., Any]: ...

max_hop_width: int

# How the module reads and makes tensors (csrc/tensors.h, operands.h).
def use_torch(torch: ModuleType, interface: Any, device: str) -> bool: ...
def allow_hopper(allowed: bool, /) -> None: ...
def build_info() -> dict[str, Any]: ...
