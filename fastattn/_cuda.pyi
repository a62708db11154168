# What csrc/cuda/module.cpp and bind_*.cpp define. Under the emulator there is set_seed, too.
from typing import Any

_Operand = tuple[int, tuple[int, ...]]  # address, strides
_Result = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, strides, sizes

def attention_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    lse: int,
    scale: float,
    options: tuple[Any, ...],
    weights: tuple[_Result, int, float] | None,
) -> None: ...
def attention_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    lse: int,
    scale: float,
    options: tuple[Any, ...],
    gradients: tuple[Any, ...],
) -> None: ...
def build_info() -> dict[str, Any]: ...
