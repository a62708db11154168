"""Traces a ``score_mod``: calls it once with recorders in place of the numbers of a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastattn.backends._score_program import NAMED, Op
from fastattn.compat import is_symbolic_number
from fastattn.ops._score_compile import SCORE, Gather, Graph
from fastattn.ops._score_operations import OF_ROWS, OPERATIONS
from fastattn.ops._score_values import OP, Number, Partial, Recorded, Row, name_of, unsupported

_INT32_END = 2**31
# The functions that read only the layout of a captured tensor: it is traced again on a change.
_LAYOUT_READERS = {"get", "size", "dim", "numel", "len", "is_floating_point"}
_CONSTANT_FACTORIES = {"tensor", "zeros", "ones", "full", "scalar_tensor"}


def place_of(x: Tensor, tensors: Sequence[Tensor]) -> int:
    """The index of a tensor in a list, -1 if it is not there.

    Compared by ``is``, because the compiler would guard on the value of an ``id()``.
    """
    for n, each in enumerate(tensors):
        if each is x:
            return n
    return -1


class Tracer(TorchFunctionMode):
    """Records operations on the numbers of a pair; operations on captured tensors alone run.

    ``is_reusable``: whether the trace holds for all calls whose captured tensors have the same
    layouts. It does not if a number was computed from the values of a captured tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.graph, self.dtype, self.device, self.is_reusable = Graph(), dtype, device, True
        self.floating: list[Tensor] = []  # captured tensors
        self.integers: list[Tensor] = []  # captured tensors of integers and booleans
        self.numbers: list[int] = []  # their sizes and strides, symbolic in a compiled function
        self._constants: list[Tensor] = []

    def trace(self, score_mod: Callable[..., Any]) -> int:
        """Call the function once; return the node of its result."""
        score = Number(self, SCORE, "f")
        ops = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)
        with self:
            result = score_mod(score, *(Number(self, self.graph.add(op), "i") for op in ops))
        if isinstance(result, Tensor) and result.dim() == 0:
            result = self.number(result)
        if not isinstance(result, Number):
            shape = getattr(result, "shape", None)
            got = type(result).__name__ if shape is None else f"shape {tuple(shape)}"
            raise TypeError(f"{OP}: score_mod must return a tensor without dimensions, got {got}")
        return result.to_kind("f").node

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record operations on recorded values; run all others, and update ``is_reusable``."""
        kwargs = kwargs or {}
        operands = [x for arg in (*args, *kwargs.values())
                for x in (arg if isinstance(arg, (tuple, list)) else (arg,))]  # fmt: skip
        if any(isinstance(x, Recorded) for x in operands):
            return self.record(name_of(func), args, kwargs)
        result = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in operands):
            is_constant = isinstance(result, Tensor) and name_of(func) in _CONSTANT_FACTORIES
            if is_constant and result.is_cpu and result.dim() == 0 and not result.requires_grad:
                self._constants.append(result)
            elif isinstance(result, Tensor):
                self.is_reusable = False
        elif isinstance(result, Tensor) or name_of(func) not in _LAYOUT_READERS:
            self.is_reusable = False
        return result

    def record(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an operation by its name; return a :class:`Number`, ``Row`` or ``Partial``."""
        if name == "getitem":
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            return (x if isinstance(x, (Partial, Row)) else Partial(self, x, ())).getitem(index)
        args = [Partial(self, x, ()) if isinstance(x, Tensor) and x.dim() else x for x in args]
        has_rows = any(isinstance(x, (Partial, Row)) for x in args)
        operation = (OF_ROWS if has_rows else {}).get(name) or OPERATIONS.get(name)
        if operation is None:
            raise unsupported(f"{name}()")
        try:
            if has_rows:
                args = [x.row() if isinstance(x, Partial) else x for x in args]
                if name in OF_ROWS:
                    return operation(*args, **kwargs)
                return Row.apply(self, name, args, kwargs)
            first, *others = args
            return operation(self.number(first), *others, **kwargs)
        except TypeError as error:
            raise unsupported(f"{name}() with these arguments", str(error)) from None

    def number(self, x: Any, kind: str | None = None) -> Number:
        """Make a :class:`Number` of a Python number or of a tensor without dimensions."""
        graph = self.graph
        if isinstance(x, Number):
            return x
        if isinstance(x, Tensor) and place_of(x, self._constants) >= 0:
            x = x.item()
        if isinstance(x, Tensor):
            return Partial(self, x, ()).getitem(())
        if isinstance(x, bool):
            return Number(self, graph.integer(-int(x)), "b")
        if isinstance(x, int) and is_symbolic_number(x):
            node = graph.add(Op.NUMBER, numbers=(self._size_place(x),))
            return Number(self, node, "i").to_kind(kind or "i")
        if isinstance(x, int) and kind != "f":
            if not -_INT32_END <= x < _INT32_END:
                raise unsupported(f"the number {x}", "which does not fit int32")
            return Number(self, graph.integer(x), "i")
        if isinstance(x, (int, float)):
            # Not float(): the compiler must see a constant.
            return Number(self, graph.const(x.__float__()), "f")
        raise unsupported(f"{type(x).__name__}", "which is no number")

    def gather_element(self, x: Tensor, index: tuple[Number, ...]) -> Number:
        """Record an element of a captured tensor, whose index is computed for each pair."""
        if x.device != self.device:
            raise RuntimeError(
                f"{OP}: score_mod must capture tensors on query's device {self.device}, "
                f"got {x.device}"
            )
        if x.is_complex() or not 0 < x.numel() < _INT32_END:
            raise unsupported(f"a captured tensor of {x.dtype} and shape {tuple(x.shape)}")
        is_floating, graph = x.is_floating_point(), self.graph
        captured = self.floating if is_floating else self.integers
        if (place := place_of(x, captured)) < 0:
            place = len(captured)
            captured.append(x)
        start = self._size_place(sum([each.numel() for each in captured[:place]]))
        flat_index, stride = graph.integer(0), x.numel()
        for dim, (n, size) in enumerate(zip(index, x.shape, strict=True)):
            stride //= size
            numbers = self._size_place(size), self._size_place(stride)
            term = graph.add(Op.INDEX, n.node, numbers=numbers)
            flat_index = graph.add(Op.IADD, flat_index, term) if dim else term
        op = Op.GATHER if is_floating else Op.GATHER_INT
        node = graph.add(op, flat_index, numbers=(start, self._size_place(x.numel())))
        if is_floating:
            graph.gathers[node] = Gather(place, tuple([n.node for n in index]))
            return Number(self, node, "f")
        element = Number(self, node, "i")
        return element.to_kind("b") if x.dtype is torch.bool else element

    def _size_place(self, number: int) -> int:
        """Return the place of a size or stride among the numbers that each call fills in."""
        if number not in self.numbers:
            self.numbers.append(number)
        return NAMED + self.numbers.index(number)
