"""The options of each primitive, as records.

A record is passed, as one object, from the public function to the backend that runs. Its fields are
also the last arguments of the dispatcher operator, in this order: :func:`schema` and
:func:`values_of` derive them. To add an option, add a field with a default that leaves it out. A
backend that does not list it (:data:`EVERYWHERE`) then declines each call that uses it.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import torch

OptionsRecord = TypeVar("OptionsRecord")

# The weights to return: none, one matrix per head, their mean over the heads.
Weights = Literal[0, 1, 2]
# None while a tracer records, because a number would tie the graph to one size; set at run time.
Derived = Annotated[float, "None until the call runs"]
DerivedInt = Annotated[int, "None until the call runs"]
Constant = Annotated[int, "never a symbol of the compiler"]


class Record:
    """Options, with caches of values derived from them: a plan uses one record in every call."""

    # The options as the CPU's core parsed them, and the options of the backward pass.
    __slots__ = ("core", "of_backward")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class AttentionOptions(Record):
    """Options of attention. For query i and key j of one sequence, d = i + offset - j."""

    scale: Derived  # factor of the scores; None: 1 / sqrt(D)
    offset: DerivedInt = 0  # the position of query 0 among the keys; None: Lk - Lq
    window_left: int = -1  # keys visible before a query's position (d <= left); -1: all
    window_right: int = -1  # keys visible after it (-d <= right); -1: all; 0: causal
    softcap: float = 0.0  # bound of the scores; 0: none
    dropout_p: float = 0.0  # probability of dropping a weight
    # For the draws of dropout, if the call is a part of a larger one: the indices of its query 0,
    # key 0 and query head 0 in the larger call.
    first_query: int = 0
    first_key: int = 0
    first_head: int = 0
    weights: Weights = 0


@dataclass(frozen=True)
class AttentionBackwardOptions(AttentionOptions):
    needs_mask_grad: bool = False
    # out and lse are the results of all keys, of which this call has only some. The call has no
    # sinks and no gradient of weights.
    partial: bool = False


@dataclass(frozen=True)
class FlexOptions(Record):
    """Options of attention with a modified score."""

    scale: Derived


@dataclass(frozen=True)
class VarlenOptions(Record):
    """Options of attention over packed sequences; positions count within a sequence.

    An option that attention has, too, has the same meaning.
    """

    scale: Derived
    bottom_right: bool = False  # the last query of a sequence is at its last key, not 0 at key 0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0


@dataclass(frozen=True)
class DecodeOptions(Record):
    """Options of attention to a cache; the last query is at the last key."""

    scale: Derived
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0


# The dtypes of quantised caches, and the largest number of each.
QUANTISED = {torch.int8: 127, torch.float8_e4m3fn: 448}


def largest_scale(dtype: torch.dtype) -> float:
    """The largest scale of rows of a quantised dtype.

    Kernels read e4m3 as numbers times 2^-8, and multiply its scales by 2^8.
    """
    return torch.finfo(torch.float32).max / (256 if dtype == torch.float8_e4m3fn else 1)


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors share memory, element by element at the same indices."""
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


@dataclass(frozen=True)
class AppendOptions(Record):
    """Options of appending to a cache."""

    # The columns of rotated pair r: 2 r and 2 r + 1, or else r and r + R / 2, of R rotated ones.
    rotary_interleaved: bool = False


@dataclass(frozen=True)
class AdditiveOptions(Record):
    """Options of additive attention."""

    causal: bool = False  # key j is visible to query i for j <= i
    dropout_p: float = 0.0
    weights: bool = False  # return the weights


@dataclass(frozen=True)
class AdditiveBackwardOptions(AdditiveOptions):
    needs_mask_grad: bool = False


@dataclass(frozen=True)
class LocalOptions(Record):
    """Options of local attention."""

    reach: int = 1  # D: a query sees the keys within this distance of its position
    bell: bool = False  # a weight is multiplied by exp(-2 ((j - p) / D)^2)

    def window_size(self, keys: Any) -> Any:
        """W, the number of keys in a window."""
        if isinstance(keys, torch.Tensor):  # while torch.jit.trace records
            return keys.clamp(max=2 * self.reach + 1)
        return torch.sym_min(2 * self.reach + 1, keys)


@dataclass(frozen=True)
class MemoryHopOptions(Record):
    """Options of memory hops."""

    hops: int = 1
    activation: str = "none"  # of the state after a hop: or "relu", "tanh", "sigmoid"
    normalize: str = "softmax"  # of the scores: "softmax", or "none" for the linear start
    scale: float = 1.0
    weights: bool = False


@dataclass(frozen=True)
class MemoryHopBackwardOptions(MemoryHopOptions):
    # Bits that request gradients: query, in_memory, out_memory, hop_proj, memory_bias.
    needed: Constant = 0


@dataclass(frozen=True)
class HopfieldOptions(Record):
    """Options of Hopfield retrieval."""

    scale: float = 1.0
    steps_max: int = 1  # < 0: no limit
    eps: float = 0.0  # a query stops when its state moves less
    together: int = 1  # queries that stop together
    crowded: bool = False  # the queries of a group come from several entries of the batch
    grad: str = "unroll"  # or "implicit"


@dataclass(frozen=True)
class HopfieldBackwardOptions(HopfieldOptions):
    needed: Constant = 0  # bits of the gradients to compute: state, stored, keys, bias


@dataclass(frozen=True)
class EncodeMemoryOptions(Record):
    """Options of encoding sentences as memories."""

    padding_idx: Constant | None = None  # the token without an embedding


@dataclass(frozen=True)
class EncodeMemoryBackwardOptions(Record):
    rows: int = 0  # of the embedding table
    temporal: bool = False  # whether there are temporal rows
    padding_idx: Constant | None = None


@dataclass(frozen=True)
class SinusoidalOptions(Record):
    """Options of the sinusoidal encoding."""

    offset: int = 0  # the position of the first row
    layout: str = "interleaved"
    max_timescale: float = 10000.0
    scale: float = 1.0  # factor of the input
    padding_idx: Constant | None = None  # the position that gets no encoding


@dataclass(frozen=True)
class NoOptions(Record):
    """The options of a primitive that takes tensors only."""


@dataclass(frozen=True)
class LinearOptions(Record):
    """Options of a linear layer."""

    gemm: str = ""  # of the CPU backend: "torch", "onednn", "ours"; "": see evidence.py


@dataclass(frozen=True)
class LinearBackwardOptions(LinearOptions):
    needed: Constant = 0  # bits of the gradients to compute: x, weight, bias


_KINDS = {
    int: "SymInt",
    bool: "bool",
    float: "float",
    str: "str",
    Derived: "float?",
    DerivedInt: "SymInt?",
    Weights: "int",
    Constant: "int",
    Constant | None: "int?",
}


def schema(record: type) -> str:
    """The fields of a record as arguments in the schema of a dispatcher operator."""
    kinds = typing.get_type_hints(record, include_extras=True)
    return ", ".join(f"{_KINDS[kinds[field.name]]} {field.name}" for field in fields(record))


def values_of(options: Any) -> list[Any]:
    """The values of the fields, in order."""
    return [getattr(options, field.name) for field in fields(options)]


def served_fields(base: Mapping[str, frozenset[str]], **more: str) -> dict[str, frozenset[str]]:
    """The fields that a backend serves, by primitive: ``base``, and for some ``more``."""
    extended = {op: base.get(op, frozenset()) | {*names.split()} for op, names in more.items()}
    return {**base, **extended}


# The options that the kernels of all backends serve, forward and backward. Each backend lists its
# additional options, and declines calls that use any other option.
EVERYWHERE = served_fields(
    {},
    additive_attention="causal dropout_p weights needs_mask_grad",
    append_to_cache="",
    decode_attention="scale window_left window_right softcap",
    encode_memory="padding_idx rows temporal",
    flex_attention="scale",
    hopfield_retrieve="scale steps_max eps together crowded grad needed",
    memory_hop_attention="hops activation normalize scale weights needed",
    merge_states="",
    scaled_dot_product_attention="scale offset window_left window_right softcap dropout_p weights "
    "needs_mask_grad partial",
    sinusoidal_encoding="offset layout max_timescale scale padding_idx",
    varlen_attention="scale bottom_right window_left window_right softcap dropout_p",
)


def why_not_options(options: Any, served: frozenset[str]) -> list[str]:
    """The reasons of a backend with these fields against a call: the other options in use."""
    record: Any = type(options)
    fields_and_defaults = unserved_fields(record, served)
    used = (name for name, default in fields_and_defaults if getattr(options, name) != default)
    return [f"has no {name}" for name in used]


@functools.cache
def unserved_fields(record: type, served: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    """The fields that are not among the served ones, with their defaults."""
    return tuple(
        (field.name, field.default)
        for field in fields(record)
        if field.name not in served and field.default is not MISSING
    )


def needs_gradient(options: Any, n: int, name: str) -> bool:
    """Whether a backward pass computes its gradient number n, of the tensor ``name``."""
    if hasattr(options, "needed"):
        return n == 0 or bool(options.needed >> n & 1)
    return bool(getattr(options, "needs_mask_grad" if name == "attn_mask" else name, True))


def convert_options(record: type[OptionsRecord], options: Any) -> OptionsRecord:
    """Convert options to the record of another primitive; its other fields get their defaults.

    Fields of the same name have the same meaning in both.
    """
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]
    return record(**{name: x for name, x in vars(options).items() if name in names})


def extend_options(record: type[OptionsRecord], options: Any, **more: Any) -> OptionsRecord:
    """Convert the options of a forward pass to the record of its backward pass."""
    return record(**vars(options), **more)
