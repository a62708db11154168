"""Records the values that the conversion of a ``BlockMask`` read, to detect later changes.

A ``BlockMask`` is an object that callers change: PyTorch's own decoding loop assigns another
``mask_mod`` to the same object in each step. A conversion holds as long as all values that it read
are the same: the block tensors, and the code of ``mask_mod`` with the values that it captured.
Tensors are compared by value, because other libraries write to them without a new version.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fastattn import compat
from fastattn.compat import has_strided_memory

_ATTRIBUTES = (
    "seq_lengths",
    "BLOCK_SIZE",
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "mask_mod",
)
_CONSTANTS = (int, float, bool, complex, str, bytes, type(None), type(...), CodeType)
_CONSTANTS_OF_TORCH = (torch.dtype, torch.device, torch.layout)
_CONTAINERS = (tuple, list, torch.Size)
_STEADY = ("torch", "math", "operator", "builtins")  # packages whose names keep their meaning
_IMPORT = dis.opmap["IMPORT_NAME"]


class _Unobservable(Exception):
    """A value whose changes cannot be detected."""


class Observation:
    """The values that a conversion read."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def with_copies(self) -> Observation:
        """Return an observation with copies of the tensors, which the caller may change."""
        return Observation([_copy(x) if isinstance(x, Tensor) else x for x in self._values])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Observation):
            return NotImplemented
        a, b = self._values, other._values
        return len(a) == len(b) and all(map(_is_same, a, b))

    __hash__ = None  # type: ignore[assignment]


def observe(block_mask: Any) -> Observation | None:
    """Return the values that converting a ``BlockMask`` reads; None if any cannot be observed."""
    values: list[Any] = []
    try:
        for name in _ATTRIBUTES:
            values += _flatten(getattr(block_mask, name), set())
    except _Unobservable:
        return None
    return Observation(values)


def values_of(function: Any) -> list[Any] | None:
    """Return all values that a function reads; None if any cannot be observed."""
    try:
        return list(_flatten(function, set()))
    except _Unobservable:
        return None


def _copy(x: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        copy: Tensor = compat.run_outside(torch.clone, x)
    return copy


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
            return False
        return bool(compat.run_outside(torch.equal, a, b))
    return a is b or (isinstance(a, (*_CONSTANTS, *_CONSTANTS_OF_TORCH)) and a == b)


def _flatten(value: Any, functions: set[FunctionType]) -> Iterator[Any]:
    """Flatten a value into constants, tensors, and immutable objects."""
    kind = type(value)
    if kind in _CONSTANTS or kind in _CONSTANTS_OF_TORCH:
        yield value
    elif isinstance(value, Tensor):
        if kind not in (Tensor, torch.nn.Parameter) or not _is_readable(value):
            raise _Unobservable
        yield value
    elif kind in _CONTAINERS:
        yield from (kind, len(value))
        for part in value:
            yield from _flatten(part, functions)
    elif kind is dict:
        yield from _flatten(tuple(value.items()), functions)
    elif kind is functools.partial:
        yield from _flatten((value.func, value.args, value.keywords), functions)
    elif kind is FunctionType:
        yield from _flatten_function(value, functions)
    elif _is_steady(value):
        yield value
    else:
        raise _Unobservable


def _is_readable(x: Tensor) -> bool:
    return not x.is_nested and x.layout is torch.strided and has_strided_memory(x)


def _is_steady(value: Any) -> bool:
    """Whether a module, class or native function behaves the same in each call."""
    if isinstance(value, BuiltinFunctionType):  # a bound method reads its object
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, (ModuleType, type)) and _root_package(name) in _STEADY


def _root_package(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _flatten_function(function: FunctionType, functions: set[FunctionType]) -> Iterator[Any]:
    """Yield the code of a function, and the values of all names that the code can read."""
    if function in functions:  # it calls itself
        return
    functions.add(function)
    yield function.__code__
    try:
        captured = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a variable without a value yet
        raise _Unobservable from None
    readable = (captured, function.__defaults__, function.__kwdefaults__, vars(function))
    yield from _flatten(readable, functions)
    if _root_package(function.__module__) in _STEADY:
        return
    for name in _find_names(function.__code__):
        if name in function.__globals__:
            yield name
            yield from _flatten(function.__globals__[name], functions)


@functools.lru_cache(maxsize=256)
def _find_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names and attributes that a code object and its nested functions read."""
    if _IMPORT in code.co_code[::2]:
        raise _Unobservable
    inner = [_find_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))
