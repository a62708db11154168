# What csrc/cuda/module.cpp and bind_*.cpp define. Under the emulator there is set_seed, too.
# Options and the dicts of operands are read by name; a name that is missing is a TypeError, and so
# is a value of another type.
from typing import Any

from fastattn.backends import primitives

_Operands = dict[str, Any]
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
    options: primitives.AdditiveOptions,
    operands: _Operands,
    results: _Operands,
) -> None: ...
def additive_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.AdditiveOptions,
    operands: _Operands,
    gradients: _Operands,
) -> None: ...
def attention_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.AttentionOptions | primitives.VarlenOptions,  # by operands["q_starts"]
    operands: _Operands,
    weights: tuple[_Result, int, float] | None,
) -> None: ...
def attention_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.AttentionOptions | primitives.VarlenOptions,
    operands: _Operands,
    gradients: _Operands,
) -> None: ...
def sinusoidal_encoding(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, _Operand],
    positions: _Operand | None,
    tables: tuple[int, ...],
    interleaved: bool,
    options: primitives.SinusoidalOptions,
) -> None: ...
def encode_memory_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.EncodeMemoryOptions,
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
    options: primitives.EncodeMemoryBackwardOptions,
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
    options: primitives.HopfieldOptions,
    bias_dtype: int,
    operands: tuple[_Operand | None, ...],
    shared: tuple[int, ...],
    out: int,
) -> None: ...
def memory_hops_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    flags: tuple[bool, ...],
    options: primitives.MemoryHopOptions | float,  # the scale alone: the others are defaults
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
    options: primitives.MemoryHopOptions | float,  # the scale alone: the others are defaults
    bias_dtype: int,
    operands: tuple[_Operand | None, ...],
    shared: tuple[int, ...],
    given: tuple[_Operand | None, ...],
    results: tuple[int, ...],
    slots: tuple[int, ...],
    common: tuple[bool, ...],
) -> None: ...
def merge_states(
    dtypes: tuple[int, int],
    stream: int,
    sizes: tuple[int, ...],
    states: tuple[_Operand, ...],
    results: tuple[_Operand, ...],
) -> None: ...
def merge_states_backward(
    dtypes: tuple[int, int],
    stream: int,
    sizes: tuple[int, ...],
    given: tuple[_Operand | None, ...],
    states: tuple[_Operand, ...],
    results: tuple[_Operand, ...],
) -> None: ...
def decode_attention(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.DecodeOptions,
    operands: _Operands,
    cache: _Operands,
    results: _Operands,
) -> None: ...
def append_to_cache(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    operands: tuple[_Operand, ...],
    cache: _Operands,
) -> None: ...
def build_info() -> dict[str, Any]: ...
