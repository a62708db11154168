"""Traces a ``score_mod``: calls it once with recorders in place of the numbers of a pair."""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastattn.backends._score_program import NAMED, Op
from fastattn.compat import constant_for_compiler, is_symbolic_number
from fastattn.ops._score_compile import SCORE, Gather, Graph

_OP = "flex_attention"
_INTEGERS = 2**31
_LONGEST_ROW = 64
# What a trace may read of a captured tensor: it is traced again if these change.
_LAYOUT = {"get", "size", "dim", "numel", "len", "is_floating_point"}
_MAKES_CONSTANT = {"tensor", "zeros", "ones", "full", "scalar_tensor"}


def _unsupported(what: str, why: str = "which has no kernel") -> NotImplementedError:
    """The error for an operation, with the line of the caller's code."""
    frame: Any = sys._getframe(1)
    ours = (__file__, str(Path(torch.__file__).parent) + os.sep)
    while frame.f_back and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return NotImplementedError(f"{_OP}: score_mod uses {what} in {where}, {why}")


@constant_for_compiler
def _name_of(function: Any) -> str:
    name: str = function.__name__
    return name.strip("_") if name.startswith("__") else name


def place_of(x: Tensor, tensors: Sequence[Tensor]) -> int:
    """The place of this tensor, -1 if there is none: the compiler would keep an id() as a guard."""
    for n, each in enumerate(tensors):
        if each is x:
            return n
    return -1


class Tracer(TorchFunctionMode):
    """Records operations on numbers of pairs; others, of captured tensors alone, run.

    ``kept``: the trace holds for all calls with captured tensors of the same layouts. It does not
    if a number was computed from one of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.graph, self.dtype, self.device, self.kept = Graph(), dtype, device, True
        self.floating: list[Tensor] = []  # captured
        self.integers: list[Tensor] = []
        self.numbers: list[int] = []  # sizes and strides of them, symbolic while a graph is made
        self._constants: list[Tensor] = []

    def trace(self, score_mod: Callable[..., Any]) -> int:
        """The node of the result."""
        score = Number(self, SCORE, "f")
        ops = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)
        with self:
            result = score_mod(score, *(Number(self, self.graph.add(op), "i") for op in ops))
        if isinstance(result, Tensor) and result.dim() == 0:
            result = self.number(result)
        if not isinstance(result, Number):
            shape = getattr(result, "shape", None)
            got = type(result).__name__ if shape is None else f"shape {tuple(shape)}"
            raise TypeError(f"{_OP}: score_mod must return a tensor without dimensions, got {got}")
        return result.to_kind("f").node

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [x for arg in (*args, *kwargs.values())
                for x in (arg if isinstance(arg, (tuple, list)) else (arg,))]  # fmt: skip
        if any(isinstance(x, Recorded) for x in flat):
            return self.record(_name_of(func), args, kwargs)
        result = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in flat):
            constant = isinstance(result, Tensor) and _name_of(func) in _MAKES_CONSTANT
            if constant and result.is_cpu and result.dim() == 0 and not result.requires_grad:
                self._constants.append(result)
            elif isinstance(result, Tensor):
                self.kept = False
        elif isinstance(result, Tensor) or _name_of(func) not in _LAYOUT:
            self.kept = False
        return result

    def record(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "getitem":
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            return (x if isinstance(x, (Partial, Row)) else Partial(self, x, ())).at(index)
        args = [Partial(self, x, ()) if isinstance(x, Tensor) and x.dim() else x for x in args]
        rows = any(isinstance(x, (Partial, Row)) for x in args)
        operation = (_OF_ROWS if rows else {}).get(name) or _OPERATIONS.get(name)
        if operation is None:
            raise _unsupported(f"{name}()")
        try:
            if rows:
                args = [x.row() if isinstance(x, Partial) else x for x in args]
                if name in _OF_ROWS:
                    return operation(*args, **kwargs)
                return Row.of(self, name, args, kwargs)
            first, *others = args
            return operation(self.number(first), *others, **kwargs)
        except TypeError as error:
            raise _unsupported(f"{name}() with these arguments", str(error)) from None

    def number(self, x: Any, kind: str | None = None) -> Number:
        """A number of every pair: one already, of Python, or a tensor without dimensions."""
        graph = self.graph
        if isinstance(x, Number):
            return x
        if isinstance(x, Tensor) and place_of(x, self._constants) >= 0:
            x = x.item()
        if isinstance(x, Tensor):
            return Partial(self, x, ()).at(())
        if isinstance(x, bool):
            return Number(self, graph.integer(-int(x)), "b")
        if isinstance(x, int) and is_symbolic_number(x):
            node = graph.add(Op.NUMBER, numbers=(self._number(x),))
            return Number(self, node, "i").to_kind(kind or "i")
        if isinstance(x, int) and kind != "f":
            if not -_INTEGERS <= x < _INTEGERS:
                raise _unsupported(f"the number {x}", "which does not fit int32")
            return Number(self, graph.integer(x), "i")
        if isinstance(x, (int, float)):
            # Not float(): the compiler must see a constant.
            return Number(self, graph.const(x.__float__()), "f")
        raise _unsupported(f"{type(x).__name__}", "which is no number")

    def gathered(self, x: Tensor, index: tuple[Number, ...]) -> Number:
        """An element of a captured tensor."""
        if x.device != self.device:
            raise RuntimeError(
                f"{_OP}: score_mod must capture tensors on query's device {self.device}, "
                f"got {x.device}"
            )
        if x.is_complex() or not 0 < x.numel() < _INTEGERS:
            raise _unsupported(f"a captured tensor of {x.dtype} and shape {tuple(x.shape)}")
        floating, graph = x.is_floating_point(), self.graph
        captured = self.floating if floating else self.integers
        if (captured_as := place_of(x, captured)) < 0:
            captured_as = len(captured)
            captured.append(x)
        start = self._number(sum([each.numel() for each in captured[:captured_as]]))
        flat, stride = graph.integer(0), x.numel()
        for dim, (n, size) in enumerate(zip(index, x.shape, strict=True)):
            stride //= size
            numbers = self._number(size), self._number(stride)
            term = graph.add(Op.INDEX, n.node, numbers=numbers)
            flat = graph.add(Op.IADD, flat, term) if dim else term
        op = Op.GATHER if floating else Op.GATHER_INT
        node = graph.add(op, flat, numbers=(start, self._number(x.numel())))
        if floating:
            graph.gathers[node] = Gather(captured_as, tuple([n.node for n in index]))
            return Number(self, node, "f")
        found = Number(self, node, "i")
        return found.to_kind("b") if x.dtype is torch.bool else found

    def _number(self, number: int) -> int:
        """The place of a number in the list of the program."""
        if number not in self.numbers:
            self.numbers.append(number)
        return NAMED + self.numbers.index(number)


class Recorded:
    """What stands for a tensor while a function is traced."""

    tracer: Tracer

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return lambda *args, **kwargs: self.tracer.record(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Recorded))
        return found.tracer.record(_name_of(func), args, kwargs or {})


def _recorded(name: str) -> Any:
    return lambda self, *args: self.tracer.record(name.strip("_"), (self, *args), {})


def _refused(name: str) -> Any:
    def refuse(self: Recorded, *_: Any) -> Any:
        raise _unsupported(
            f"{name}()", "but values are not known: use torch.where, not if or while"
        )

    return refuse


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs "
    "eq ne lt le gt ge and rand or ror xor rxor invert pos lshift rshift matmul getitem"
).split():
    setattr(Recorded, f"__{_name}__", _recorded(f"__{_name}__"))
for _name in "bool int float index len iter".split():
    setattr(Recorded, f"__{_name}__", _refused(_name))
Recorded.__hash__ = object.__hash__  # type: ignore[method-assign]


class Partial(Recorded):
    """A captured tensor with the index of its first dimensions."""

    def __init__(self, tracer: Tracer, tensor: Tensor, index: tuple[Number, ...]) -> None:
        self.tracer, self.tensor, self.index = tracer, tensor, index

    def at(self, index: tuple[Any, ...]) -> Any:
        dims, tracer = self.tensor.dim(), self.tracer
        if index and index[0] is ...:
            index = index[1:] if len(self.index) + len(index) - 1 == dims else index
        found = (*self.index, *(tracer.number(x) for x in index))
        if len(found) > dims or any(n.kind != "i" for n in found[len(self.index) :]):
            raise _unsupported("another index", "which must be integers, one a dimension")
        if len(found) < dims:
            return Partial(tracer, self.tensor, found)
        return tracer.gathered(self.tensor, found)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape[len(self.index) :]

    def row(self) -> Row:
        if len(self.shape) != 1 or not 0 < self.shape[0] <= _LONGEST_ROW:
            raise _unsupported(
                f"a part of shape {tuple(self.shape)} of a captured tensor",
                f"but only elements and rows of at most {_LONGEST_ROW} of them are numbers",
            )
        return Row(self.tracer, self.shape[0], lambda n: self.at((n,)))


class Row(Recorded):
    """A short row of a captured tensor, or what is computed from rows element by element."""

    def __init__(self, tracer: Tracer, size: int, element: Callable[[int], Any]) -> None:
        self.tracer, self.shape, self.element = tracer, torch.Size((size,)), element

    @classmethod
    def of(cls, tracer: Tracer, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Row:
        sizes = sorted({x.shape[0] for x in args if isinstance(x, Row)} - {1}) or [1]
        if len(sizes) > 1:
            raise TypeError(f"rows of {sizes} elements do not match")

        def element(n: int) -> Any:  # made where it is used: few are alive at a time
            each = [x.at((n if x.shape[0] > 1 else 0,)) if isinstance(x, Row) else x for x in args]
            return tracer.record(name, each, kwargs)

        return cls(tracer, sizes[0], element)

    def at(self, index: tuple[Any, ...]) -> Any:
        if len(index) != 1 or not isinstance(index[0], int):
            raise _unsupported("another index of a row", "which must be a number")
        return self.element(range(self.shape[0])[index[0]])

    def reduced(self, combine: Callable[[Any, Any], Any], dim: Any = -1, **named: Any) -> Any:
        if named or not (dim is None or (isinstance(dim, int) and dim in (-1, 0))):
            raise TypeError("of a row, whose dim is -1 or 0")
        return functools.reduce(combine, (self.element(n) for n in range(self.shape[0])))


class Number(Recorded):
    """A number of every pair: kind "f" floating, "i" integer, "b" boolean."""

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
        node = self.tracer.graph.add(op, self.node, *(x.node for x in others))
        return Number(self.tracer, node, kind or self.kind)

    def like(self, number: float) -> Number:
        return self.tracer.number(number, "f" if self.kind == "f" else None)

    def to_kind(self, kind: str) -> Number:
        if kind == self.kind:
            return self
        if kind == "b":
            equal = Op.EQ if self.kind == "f" else Op.IEQ
            return self.add_node(equal, self.like(0), kind="b").add_node(Op.NOT)
        if self.kind == "b":
            number = self.add_node(Op.AND, self.tracer.number(1), kind="i")
            return number.to_kind(kind)
        return self.add_node(Op.TO_FLOAT if kind == "f" else Op.TO_INT, kind=kind)


def _promoted(x: Number, other: Any, least: str = "b") -> tuple[Number, Number, str]:
    """Both numbers in one kind, as PyTorch promotes them, at least ``least``."""
    y = x.tracer.number(other, "f" if "f" in (x.kind, least) else None)
    kind = max(x.kind, y.kind, least, key="bif".index)
    return x.to_kind(kind), y.to_kind(kind), kind


def _arithmetic(floating: Op, integral: Op) -> Any:
    def operation(x: Number, other: Any, *, alpha: Any = 1) -> Number:
        if not (isinstance(alpha, int) and alpha == 1):
            other = x.tracer.number(other) * alpha
        a, b, kind = _promoted(x, other, "i")
        return a.add_node(floating if kind == "f" else integral, b)

    return operation


def _compared(floating: Op, integral: Op, swaps: bool = False, negates: bool = False) -> Any:
    def operation(x: Number, other: Any) -> Number:
        a, b, kind = _promoted(x, other, "i")
        a, b = (b, a) if swaps else (a, b)
        found = a.add_node(floating if kind == "f" else integral, b, kind="b")
        return found.add_node(Op.NOT) if negates else found

    return operation


def _bits(op: Op, logical: bool) -> Any:
    def operation(x: Number, other: Any) -> Number:
        a, b, kind = _promoted(x, other)
        if logical or kind == "b":
            a, b = a.to_kind("b"), b.to_kind("b")
        elif kind == "f":
            raise TypeError("which are not integers")
        return a.add_node(op, b)

    return operation


def _binary(op: Op, x: Any, other: Any) -> Number:
    a, b, _ = _promoted(x, other, "f")
    return a.add_node(op, b)


def _unary(op: Op) -> Any:
    return lambda x: x.to_kind("f").add_node(op)


def _reversed(name: str) -> Any:
    return lambda x, other: _OPERATIONS[name](x.tracer.number(other), x)


def _divided(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _binary(Op.DIV, x, other)
    a, b, kind = _promoted(x, other, "i")
    if rounding_mode == "trunc":
        if kind == "f":
            return _truncated(_binary(Op.DIV, a, b))
        flip = a.add_node(Op.XOR, b).lt(0)  # a quotient below 0 is rounded up
        down, up = (_OPERATIONS["floordiv"](x, b) for x in (a, _OPERATIONS["neg"](a)))
        return _where(flip, _OPERATIONS["neg"](up), down)
    if rounding_mode != "floor":
        raise TypeError(f"rounding_mode={rounding_mode!r}")
    return a.add_node(Op.IDIV, b) if kind == "i" else a.add_node(Op.DIV, b).floor()


def _remainder(x: Any, other: Any) -> Any:
    a, b, kind = _promoted(x, other, "i")
    if kind == "i":
        return a.add_node(Op.IMOD, b)
    return a.sub(a.div(b).floor().mul(b))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if condition.kind != "b":  # as a method: x.where(condition, other)
        condition, a = condition.tracer.number(a), condition
    if condition.kind != "b":
        raise TypeError("the condition must be boolean")
    x, y, kind = _promoted(condition.tracer.number(a), b)
    if x.node == y.node:
        return x
    return condition.add_node(Op.SELECT, x, y, kind=kind)


def _extreme(op: Op) -> Any:
    def operation(x: Any, other: Any) -> Any:
        a, b, kind = _promoted(x, other)
        if kind == "f":
            return a.add_node(op, b)
        return _where(a.lt(b), *((a, b) if op is Op.MIN else (b, a)))

    return operation


def _clamped(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = _where(x < min, min, x)
    return x if max is None else _where(x > max, max, x)


def _power(x: Any, exponent: Any) -> Any:
    known = isinstance(exponent, (int, float))
    if known and abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else 1 / x.sqrt()
    if not known or abs(exponent) > 16 or exponent != int(exponent):
        return _binary(Op.POW, x, exponent)
    product = x.like(1)
    for bit in f"{abs(int(exponent)):b}":
        product = product * product * x if bit == "1" else product * product
    return 1 / product if exponent < 0 else product


def _shifted(x: Any, bits: Any, to: str) -> Any:
    if x.kind != "i" or not isinstance(bits, int) or not 0 <= bits < 31:
        raise TypeError("which must be an integer, by a number of bits from 0 to 30")
    return _OPERATIONS[to](x, 2**bits)


def _truncated(x: Any) -> Any:
    return x if x.kind != "f" else _where(x < 0, -(-x).floor(), x.floor())


def _rounded(x: Any) -> Any:
    """Halves to even numbers."""
    if x.kind != "f":
        return x
    down = x.floor()
    odd = (down * 0.5).floor() * 2 != down
    up = (x - down > 0.5) | ((x - down == 0.5) & odd)
    return down + up.to_kind("f")


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    y = x.to_kind("f") * beta
    soft = (y.maximum(0.0) + (-y.abs()).exp().log1p()) / beta  # without an overflow
    return _where(y > threshold, x, soft)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "none":
        return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x * 0.5 * (1 + inner.tanh())


def _converted(x: Any, *targets: Any, **named: Any) -> Any:
    """``x.to(...)``: a dtype, also a tensor's, changes the kind; a device changes nothing."""
    for target in (*targets, named.get("dtype"), named.get("other")):
        dtype = getattr(target, "dtype", target)
        if isinstance(dtype, torch.dtype):
            is_bool = dtype is torch.bool
            return x.to_kind("f" if dtype.is_floating_point else "b" if is_bool else "i")
    return x


def _filled(value: Any) -> Any:
    def operation(x: Any, *args: Any, **kwargs: Any) -> Any:
        number = (args[-1] if args else kwargs["fill_value"]) if value is None else value
        return _converted(x.like(number), kwargs.get("dtype"))

    return operation


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "truediv": _divided,
    "floordiv": lambda x, other: _divided(x, other, rounding_mode="floor"),
    "mod": _remainder,
    "pow": _power,
    "neg": lambda x: x.add_node(Op.NEG) if x.kind == "f" else 0 - x,
    "pos": lambda x: x,
    "lshift": functools.partial(_shifted, to="mul"),
    "rshift": functools.partial(_shifted, to="floordiv"),
    "abs": lambda x: x.add_node(Op.ABS if x.kind == "f" else Op.IABS),
    "ne": _compared(Op.EQ, Op.IEQ, negates=True),
    "gt": _compared(Op.LT, Op.ILT, swaps=True),
    "ge": _compared(Op.LE, Op.ILE, swaps=True),
    "invert": lambda x: x.add_node(Op.NOT),
    "logical_not": lambda x: x.to_kind("b").add_node(Op.NOT),
    "where": _where,
    "masked_fill": lambda x, condition, value: _where(condition, value, x),
    "min": _extreme(Op.MIN),
    "max": _extreme(Op.MAX),
    "clamp": _clamped,
    "clamp_min": lambda x, min: _clamped(x, min),
    "clamp_max": lambda x, max: _clamped(x, None, max),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: _clamped(x, min_val, max_val),
    "floor": lambda x: x.add_node(Op.FLOOR) if x.kind == "f" else x,
    "ceil": lambda x: -(-x).floor(),
    "trunc": _truncated,
    "round": _rounded,
    "frac": lambda x: x - _truncated(x),
    "fmod": lambda x, other: x - _divided(x, other, rounding_mode="trunc") * other,
    "sign": lambda x: (x > 0).to_kind(x.kind) - (x < 0).to_kind(x.kind),
    "isnan": lambda x: x != x,
    "isinf": lambda x: x.abs() == math.inf,
    "isfinite": lambda x: x.abs() < math.inf,
    "log2": lambda x: x.log() * (1 / math.log(2)),
    "log10": lambda x: x.log() * (1 / math.log(10)),
    "tan": lambda x: x.sin() / x.cos(),
    "asin": lambda x: x.atan2(((1 - x) * (1 + x)).sqrt()),
    "acos": lambda x: ((1 - x) * (1 + x)).sqrt().atan2(x),
    "atan": lambda x: x.atan2(1.0),
    "atan2": lambda y, x: _binary(Op.ATAN2, y, x),
    "sinh": lambda x: (x.expm1() - (-x).expm1()) * 0.5,
    "cosh": lambda x: 1 + 2 * (x * 0.5).sinh().square(),
    "hypot": lambda x, y: (x * x + y * y).sqrt(),
    "rsqrt": lambda x: 1 / x.sqrt(),
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "relu": lambda x, inplace=False: _where(x <= 0, 0, x),
    "leaky_relu": lambda x, negative_slope=0.01, **_: _where(x > 0, x, x * negative_slope),
    "silu": lambda x, inplace=False: x * x.sigmoid(),
    "gelu": _gelu,
    "softplus": _softplus,
    "logsigmoid": lambda x: -_softplus(-x, threshold=math.inf),
    "to": _converted,
    "clone": lambda x: x,
    # A selection between a number and itself has no derivative, see Graph.
    "detach": lambda x: x.tracer.number(True).add_node(Op.SELECT, x, x, kind=x.kind),
    "full_like": _filled(None),
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
}
for _name in "add sub mul".split():
    _OPERATIONS[_name] = _arithmetic(Op[_name.upper()], Op["I" + _name.upper()])
for _name in "eq lt le".split():
    _OPERATIONS[_name] = _compared(Op[_name.upper()], Op["I" + _name.upper()])
for _name in "exp exp2 expm1 log log1p tanh sigmoid sqrt sin cos erf".split():
    _OPERATIONS[_name] = _unary(Op[_name.upper()])
for _name in "and or xor".split():
    _OPERATIONS[_name] = _bits(Op[_name.upper()], False)
    _OPERATIONS[f"logical_{_name}"] = _bits(Op[_name.upper()], True)
for _pair in (
    "div=truediv divide=truediv true_divide=truediv floor_divide=floordiv remainder=mod "
    "multiply=mul subtract=sub negative=neg absolute=abs minimum=min maximum=max clip=clamp "
    "bitwise_and=and bitwise_or=or bitwise_xor=xor bitwise_not=invert type=to type_as=to "
    "new_zeros=zeros_like new_ones=ones_like new_full=full_like fix=trunc arcsin=asin arccos=acos "
    "arctan=atan arctan2=atan2 bitwise_left_shift=lshift bitwise_right_shift=rshift positive=pos "
    "log_sigmoid=logsigmoid"
).split():
    _alias, _, _of = _pair.partition("=")
    _OPERATIONS[_alias] = _OPERATIONS[_of]
for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    _OPERATIONS[f"r{_name}"] = _reversed(_name)
for _name in "float double half bfloat16 int long bool".split():
    _OPERATIONS[_name] = functools.partial(_converted, dtype=getattr(torch, _name))


def _dot(x: Any, y: Any) -> Any:
    return Row.of(x.tracer, "mul", (x, y), {}).reduced(operator.add)


# Of rows alone; all others are applied to each element.
_OF_ROWS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, dim=-1, **named: x.reduced(operator.add, dim, **named),
    "mean": lambda x, dim=-1, **named: x.reduced(operator.add, dim, **named) / x.shape[0],
    "amax": lambda x, dim=-1, **named: x.reduced(torch.maximum, dim, **named),
    "amin": lambda x, dim=-1, **named: x.reduced(torch.minimum, dim, **named),
    "norm": lambda x, p=2, dim=-1: _norm(x, p, dim),
    **dict.fromkeys("dot vdot inner matmul".split(), _dot),
}


def _norm(x: Any, p: Any, dim: Any) -> Any:
    if p != 2:
        raise TypeError(f"p={p!r}")
    return Row.of(x.tracer, "square", (x,), {}).reduced(operator.add, dim).sqrt()
