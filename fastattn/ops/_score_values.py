"""The values that stand for tensors and numbers while a ``score_mod`` is traced."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn.backends._score_program import Op
from fastattn.compat import constant_for_compiler

if TYPE_CHECKING:
    from fastattn.ops._score_trace import Tracer

OP = "flex_attention"
_LONGEST_ROW = 64
# The files of the tracer, and PyTorch: an error names the line of the code that called them.
_TRACING_PATHS = (
    str(Path(__file__).parent / "_score_"),
    str(Path(torch.__file__).parent) + os.sep,
)


def unsupported(what: str, why: str = "which has no kernel") -> NotImplementedError:
    """Return the error for an operation, with the line of the user's code that calls it."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_TRACING_PATHS):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return NotImplementedError(f"{OP}: score_mod uses {what} in {where}, {why}")


@constant_for_compiler
def name_of(function: Any) -> str:
    """Return the name of a function of PyTorch, without the underscores of a special method."""
    name: str = function.__name__
    return name.strip("_") if name.startswith("__") else name


class Recorded:
    """A value that stands for a tensor while a function is traced."""

    tracer: Tracer

    def __getattr__(self, name: str) -> Any:
        """Return any method of a tensor, as a function that the tracer records."""
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return lambda *args, **kwargs: self.tracer.record(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorded = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Recorded))
        return recorded.tracer.record(name_of(func), args, kwargs or {})


def _recording_method(name: str) -> Any:
    """A special method that the tracer records, such as ``__add__``."""
    return lambda self, *args: self.tracer.record(name.strip("_"), (self, *args), {})


def _refusing_method(name: str) -> Any:
    """A special method that would need the value of a number, such as ``__bool__``."""

    def refuse(self: Recorded, *_: Any) -> Any:
        raise unsupported(f"{name}()", "but values are not known: use torch.where, not if or while")

    return refuse


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs "
    "eq ne lt le gt ge and rand or ror xor rxor invert pos lshift rshift matmul getitem"
).split():
    setattr(Recorded, f"__{_name}__", _recording_method(f"__{_name}__"))
for _name in "bool int float index len iter".split():
    setattr(Recorded, f"__{_name}__", _refusing_method(_name))
Recorded.__hash__ = object.__hash__  # type: ignore[method-assign]


class Partial(Recorded):
    """A captured tensor of which the first dimensions are indexed, as in ``table[h]``."""

    def __init__(self, tracer: Tracer, tensor: Tensor, index: tuple[Number, ...]) -> None:
        self.tracer, self.tensor, self.index = tracer, tensor, index

    def getitem(self, index: tuple[Any, ...]) -> Any:
        """Index more dimensions: a number once all are indexed, else a :class:`Partial`."""
        dims, tracer = self.tensor.dim(), self.tracer
        if index and index[0] is ...:  # accepted only where it stands for no dimension
            index = index[1:] if len(self.index) + len(index) - 1 == dims else index
        indices = (*self.index, *(tracer.number(x) for x in index))
        if len(indices) > dims or any(n.kind != "i" for n in indices[len(self.index) :]):
            raise unsupported("indices of a tensor", "which must be integers, one a dimension")
        if len(indices) < dims:
            return Partial(tracer, self.tensor, indices)
        return tracer.gather_element(self.tensor, indices)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape[len(self.index) :]

    def row(self) -> Row:
        """Return the last dimension as a :class:`Row`, if it is the only one left and short."""
        if len(self.shape) != 1 or not 0 < self.shape[0] <= _LONGEST_ROW:
            raise unsupported(
                f"a part of shape {tuple(self.shape)} of a captured tensor",
                f"but only elements and rows of at most {_LONGEST_ROW} of them are numbers",
            )
        return Row(self.tracer, self.shape[0], lambda n: self.getitem((n,)))


class Row(Recorded):
    """A short row of a captured tensor, or the result of an operation on elements of rows.

    ``element(n)`` records element n: only when it is used, so that few elements are live at a time.
    """

    def __init__(self, tracer: Tracer, size: int, element: Callable[[int], Any]) -> None:
        self.tracer, self.shape, self.element = tracer, torch.Size((size,)), element

    @classmethod
    def apply(cls, tracer: Tracer, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Row:
        """Return the results of ``OPERATIONS[name]`` on each element; rows of one are broadcast."""
        sizes = sorted({x.shape[0] for x in args if isinstance(x, Row)} - {1}) or [1]
        if len(sizes) > 1:
            raise TypeError(f"rows of {sizes} elements do not match")

        def element(n: int) -> Any:
            """Record the operation on element n of each row."""
            inputs = [
                x.element(n if x.shape[0] > 1 else 0) if isinstance(x, Row) else x for x in args
            ]
            return tracer.record(name, inputs, kwargs)

        return cls(tracer, sizes[0], element)

    def getitem(self, index: tuple[Any, ...]) -> Any:
        """Return one element, by a Python integer."""
        if len(index) != 1 or not isinstance(index[0], int):
            raise unsupported("an index of a row", "which must be a number")
        return self.element(range(self.shape[0])[index[0]])

    def reduce(self, combine: Callable[[Any, Any], Any], dim: Any = -1, **named: Any) -> Any:
        """Combine all elements from the first to the last, such as their sum."""
        if named or not (dim is None or (isinstance(dim, int) and dim in (-1, 0))):
            raise TypeError("of a row, whose dim is -1 or 0")
        return functools.reduce(combine, (self.element(n) for n in range(self.shape[0])))


class Number(Recorded):
    """A number with a value for each pair of query and key: a node of the graph.

    Its ``kind`` is "f" (floating), "i" (integer) or "b" (boolean).
    """

    shape, ndim, requires_grad, is_cpu, is_cuda = torch.Size(()), 0, False, True, False

    def __init__(self, tracer: Tracer, node: int, kind: str) -> None:
        self.tracer, self.node, self.kind = tracer, node, kind

    @property
    def dtype(self) -> torch.dtype:
        return {"f": self.tracer.dtype, "i": torch.int32, "b": torch.bool}[self.kind]

    @property
    def device(self) -> torch.device:
        return self.tracer.device

    def add_node(self, op: Op, *others: Number, kind: str | None = None) -> Number:
        """Record an operation on this number and others; the result has this kind, or ``kind``."""
        node = self.tracer.graph.add(op, self.node, *(x.node for x in others))
        return Number(self.tracer, node, kind or self.kind)

    def like(self, number: float) -> Number:
        """Return a constant of the same kind."""
        return self.tracer.number(number, "f" if self.kind == "f" else None)

    def to_kind(self, kind: str) -> Number:
        """Convert the number to a kind, as PyTorch converts dtypes."""
        if kind == self.kind:
            return self
        if kind == "b":
            equal = Op.EQ if self.kind == "f" else Op.IEQ
            return self.add_node(equal, self.like(0), kind="b").add_node(Op.NOT)
        if self.kind == "b":
            number = self.add_node(Op.AND, self.tracer.number(1), kind="i")
            return number.to_kind(kind)
        return self.add_node(Op.TO_FLOAT if kind == "f" else Op.TO_INT, kind=kind)
