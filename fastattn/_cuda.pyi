# What csrc/cuda/module.cpp and bind_*.cpp define. Under the emulator there is set_seed, too.
from typing import Any

_Operand = tuple[int, tuple[int, ...]]  # address, strides
_Result = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, strides, sizes

additive_tile: int
hop_rows_of_block: int
hop_rows_of_split: int
max_hop_width: int

def additive_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    options: tuple[Any, ...],
    results: tuple[_Operand, _Operand | None, int],
) -> None: ...
def additive_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    options: tuple[Any, ...],
    gradients: tuple[Any, ...],
) -> None: ...
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
def sinusoidal_encoding(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, _Operand],
    positions: _Operand | None,
    offset: int,
    tables: tuple[int, ...],
    interleaved: bool,
    scale: float,
    padding_idx: int | None,
) -> None: ...
def encode_memory_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    padding_idx: int | None,
    factors: tuple[int, int],
    tokens: _Operand,
    weight: _Operand,
    temporal: _Operand | None,
    out: int,
) -> None: ...
def encode_memory_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    padding_idx: int | None,
    factors: tuple[int, int],
    grad: _Operand,
    words: tuple[int, int, int],
    results: tuple[int, int],
) -> None: ...
def hopfield_search(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    flags: tuple[bool, ...],
    scale: float,
    bias_dtype: int,
    operands: tuple[_Operand | None, ...],
    shared: tuple[int, ...],
    out: int,
    eps: float,
    together: int,
) -> None: ...
def memory_hops_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    flags: tuple[bool, ...],
    activation: int,
    scale: float,
    bias_dtype: int,
    operands: tuple[_Operand | None, ...],
    shared: tuple[int, ...],
    results: tuple[int, ...],
) -> None: ...
def memory_hops_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    flags: tuple[bool, ...],
    activation: int,
    scale: float,
    bias_dtype: int,
    operands: tuple[_Operand | None, ...],
    shared: tuple[int, ...],
    given: tuple[_Operand | None, ...],
    results: tuple[int, ...],
    slots: tuple[int, ...],
    common: tuple[bool, ...],
) -> None: ...
def decode_attention(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    cache: tuple[Any, ...],
    options: tuple[Any, ...],
    results: tuple[int, ...],
) -> None: ...
def append_to_cache(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    cache: tuple[Any, ...],
) -> None: ...
def build_info() -> dict[str, Any]: ...
