# What csrc/cuda/module.cpp and bind_*.cpp define. Under the emulator there is set_seed, too.
# Options and the dicts of operands are read by name; a name that is missing is a TypeError, and so
# is a value of another type.
from typing import Any

from fastattn.backends import primitives

_Operands = dict[str, Any]

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
    weights: _Operands | None,
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
    options: primitives.SinusoidalOptions,
    operands: _Operands,
    columns: _Operands,
) -> None: ...
def encode_memory_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.EncodeMemoryOptions,
    operands: _Operands,
    out: int,
) -> None: ...
def encode_memory_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.EncodeMemoryBackwardOptions,
    operands: _Operands,
    gradients: _Operands,
) -> None: ...
def hopfield_search(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.HopfieldOptions,
    operands: _Operands,
    out: int,
) -> None: ...
def memory_hops_forward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.MemoryHopOptions | float,  # the scale alone: the others are defaults
    operands: _Operands,
    results: _Operands,
) -> None: ...
def memory_hops_backward(
    dtype: int,
    stream: int,
    sizes: tuple[int, ...],
    options: primitives.MemoryHopOptions | float,
    operands: _Operands,
    gradients: _Operands,
) -> None: ...
def merge_states(
    dtype: int, lse_dtype: int, stream: int, sizes: tuple[int, ...], operands: _Operands
) -> None: ...
def merge_states_backward(
    dtype: int, lse_dtype: int, stream: int, sizes: tuple[int, ...], operands: _Operands
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
    operands: _Operands,
    cache: _Operands,
) -> None: ...
def build_info() -> dict[str, Any]: ...
