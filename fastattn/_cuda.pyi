# What csrc/cuda/module.cpp and bind_*.cpp define. Under the emulator there is set_seed, too.
# Options and the dicts of operands are read by name; a name that is missing is a TypeError, and so
# is a value of another type.
from typing import Any, Protocol, TypeVar

from fastattn.backends import primitives

_Operands = dict[str, Any]
_Sizes = tuple[int, ...]
_Options = TypeVar("_Options", contravariant=True)
_Results = TypeVar("_Results", contravariant=True)

class _Kernel(Protocol[_Options, _Results]):
    def __call__(
        self,
        dtype: int,
        stream: int,
        sizes: _Sizes,
        options: _Options,
        operands: _Operands,
        results: _Results,  # what it writes, or the address of the only result
        /,
    ) -> None: ...

_Attention = primitives.AttentionOptions | primitives.VarlenOptions  # by operands["q_starts"]
_Hops = primitives.MemoryHopOptions | float  # the scale alone: the others are defaults

additive_tile: int
hop_rows_of_block: int
hop_rows_of_split: int
max_hop_width: int

additive_forward: _Kernel[primitives.AdditiveOptions, _Operands]
additive_backward: _Kernel[primitives.AdditiveOptions, _Operands]
attention_forward: _Kernel[_Attention, _Operands | None]  # the weights
attention_backward: _Kernel[_Attention, _Operands]
sinusoidal_encoding: _Kernel[primitives.SinusoidalOptions, _Operands]  # the columns, which it reads
encode_memory_forward: _Kernel[primitives.EncodeMemoryOptions, int]
encode_memory_backward: _Kernel[primitives.EncodeMemoryBackwardOptions, _Operands]
hopfield_search: _Kernel[primitives.HopfieldOptions, int]
memory_hops_forward: _Kernel[_Hops, _Operands]
memory_hops_backward: _Kernel[_Hops, _Operands]

def mask_workspace(batch: int, heads: int, queries: int, keys: int, packed: bool, /) -> int: ...
def merge_states(
    dtype: int, lse_dtype: int, stream: int, sizes: _Sizes, operands: _Operands
) -> None: ...
def merge_states_backward(
    dtype: int, lse_dtype: int, stream: int, sizes: _Sizes, operands: _Operands
) -> None: ...
def decode_attention(
    dtype: int,
    stream: int,
    sizes: _Sizes,
    options: primitives.DecodeOptions,
    operands: _Operands,
    cache: _Operands,
    results: _Operands,
) -> None: ...
def append_to_cache(
    dtype: int, stream: int, sizes: _Sizes, operands: _Operands, cache: _Operands
) -> None: ...
def build_info() -> dict[str, Any]: ...
