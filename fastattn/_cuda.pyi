# The definitions of csrc/cuda/module.cpp and bind_*.cpp. The functions of primitives are as in
# _cpu.pyi; by keyword they also take `place`, PyTorch's current device and stream. The emulator
# adds set_seed, take_launches and take_streams.
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
