"""The operations on numbers of pairs that a ``score_mod`` may use, by their names in PyTorch.

The texts of errors here end the sentence that begins in ``Tracer.record``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from fastattn.backends._score_program import Op
from fastattn.ops._score_values import Number, Row


def _promote(x: Number, other: Any, min_kind: str = "b") -> tuple[Number, Number, str]:
    """Convert two numbers to their common kind, at least ``min_kind``, as PyTorch promotes them."""
    y = x.tracer.number(other, "f" if "f" in (x.kind, min_kind) else None)
    kind = max(x.kind, y.kind, min_kind, key="bif".index)
    return x.to_kind(kind), y.to_kind(kind), kind


def _arithmetic(floating: Op, integral: Op) -> Any:
    """An operation with one step for floating numbers and one for integers."""

    def operation(x: Number, other: Any, *, alpha: Any = 1) -> Number:
        if not (isinstance(alpha, int) and alpha == 1):
            other = x.tracer.number(other) * alpha
        a, b, kind = _promote(x, other, "i")
        return a.add_node(floating if kind == "f" else integral, b)

    return operation


def _comparison(floating: Op, integral: Op, swaps: bool = False, negates: bool = False) -> Any:
    """A comparison by the given steps; ``swaps`` its operands, or ``negates`` its result."""

    def operation(x: Number, other: Any) -> Number:
        a, b, kind = _promote(x, other, "i")
        a, b = (b, a) if swaps else (a, b)
        result = a.add_node(floating if kind == "f" else integral, b, kind="b")
        return result.add_node(Op.NOT) if negates else result

    return operation


def _bitwise(op: Op, logical: bool) -> Any:
    """A bitwise operation on integers and booleans, or a ``logical`` operation on any numbers."""

    def operation(x: Number, other: Any) -> Number:
        a, b, kind = _promote(x, other)
        if logical or kind == "b":
            a, b = a.to_kind("b"), b.to_kind("b")
        elif kind == "f":
            raise TypeError("which are not integers")
        return a.add_node(op, b)

    return operation


def _binary(op: Op, x: Any, other: Any) -> Number:
    """Record an operation on two numbers, as floating numbers."""
    a, b, _ = _promote(x, other, "f")
    return a.add_node(op, b)


def _unary(op: Op) -> Any:
    """An operation on one number, as a floating number."""
    return lambda x: x.to_kind("f").add_node(op)


def _swap_operands(name: str) -> Any:
    """The operation with its operands exchanged, as ``__radd__`` needs it."""
    return lambda x, other: OPERATIONS[name](x.tracer.number(other), x)


def _divide(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Divide as ``torch.div``."""
    if rounding_mode is None:
        return _binary(Op.DIV, x, other)
    a, b, kind = _promote(x, other, "i")
    if rounding_mode == "trunc":
        if kind == "f":
            return _truncate(_binary(Op.DIV, a, b))
        is_negative = a.add_node(Op.XOR, b).lt(0)  # a quotient below 0 is rounded up
        down, up = (OPERATIONS["floordiv"](x, b) for x in (a, OPERATIONS["neg"](a)))
        return _where(is_negative, OPERATIONS["neg"](up), down)
    if rounding_mode != "floor":
        raise TypeError(f"rounding_mode={rounding_mode!r}")
    return a.add_node(Op.IDIV, b) if kind == "i" else a.add_node(Op.DIV, b).floor()


def _remainder(x: Any, other: Any) -> Any:
    """x - other * floor(x / other), which has the sign of ``other``."""
    a, b, kind = _promote(x, other, "i")
    if kind == "i":
        return a.add_node(Op.IMOD, b)
    return a.sub(a.div(b).floor().mul(b))


def _where(condition: Any, a: Any, b: Any) -> Any:
    """Select as ``torch.where``, or as the method ``x.where(condition, other)``."""
    if condition.kind != "b":  # the method, whose first two arguments are the other way round
        condition, a = condition.tracer.number(a), condition
    if condition.kind != "b":
        raise TypeError("the condition must be boolean")
    x, y, kind = _promote(condition.tracer.number(a), b)
    if x.node == y.node:
        return x
    return condition.add_node(Op.SELECT, x, y, kind=kind)


def _extreme(op: Op) -> Any:
    """The operation ``op``, MIN or MAX, of two numbers; NaN if one is NaN."""

    def operation(x: Any, other: Any) -> Any:
        a, b, kind = _promote(x, other)
        if kind == "f":
            return a.add_node(op, b)
        return _where(a.lt(b), *((a, b) if op is Op.MIN else (b, a)))

    return operation


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Limit x to [min, max]; NaN stays."""
    if min is not None:
        x = _where(x < min, min, x)
    return x if max is None else _where(x > max, max, x)


def _power(x: Any, exponent: Any) -> Any:
    """Raise x to a power: by products for small integers, by roots for 1/2 and -1/2."""
    is_constant = isinstance(exponent, (int, float))
    if is_constant and abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else 1 / x.sqrt()
    if not is_constant or abs(exponent) > 16 or exponent != int(exponent):
        return _binary(Op.POW, x, exponent)
    product = x.like(1)
    for bit in f"{abs(int(exponent)):b}":
        product = product * product * x if bit == "1" else product * product
    return 1 / product if exponent < 0 else product


def _shift(x: Any, bits: Any, operation: str) -> Any:
    """Shift an integer by a constant number of bits: ``operation`` is "mul" or "floordiv"."""
    if x.kind != "i" or not isinstance(bits, int) or not 0 <= bits < 31:
        raise TypeError("which must be an integer, by a number of bits from 0 to 30")
    return OPERATIONS[operation](x, 2**bits)


def _truncate(x: Any) -> Any:
    """Round x towards 0."""
    return x if x.kind != "f" else _where(x < 0, -(-x).floor(), x.floor())


def _round(x: Any) -> Any:
    """Round x to the nearest integer, halves to even."""
    if x.kind != "f":
        return x
    down = x.floor()
    odd = (down * 0.5).floor() * 2 != down
    up = (x - down > 0.5) | ((x - down == 0.5) & odd)
    return down + up.to_kind("f")


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """log(1 + e^(beta x)) / beta, and x above the threshold."""
    y = x.to_kind("f") * beta
    soft = (y.maximum(0.0) + (-y.abs()).exp().log1p()) / beta  # without an overflow
    return _where(y > threshold, x, soft)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    """x Phi(x), exact or by tanh."""
    if approximate == "none":
        return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x * 0.5 * (1 + inner.tanh())


def _convert(x: Any, *targets: Any, **named: Any) -> Any:
    """Convert as ``x.to(...)``: to the kind of a dtype or tensor; a device changes nothing."""
    for target in (*targets, named.get("dtype"), named.get("other")):
        dtype = getattr(target, "dtype", target)
        if isinstance(dtype, torch.dtype):
            is_bool = dtype is torch.bool
            return x.to_kind("f" if dtype.is_floating_point else "b" if is_bool else "i")
    return x


def _fill(value: Any) -> Any:
    """An operation such as ``zeros_like``; if ``value`` is None, the call passes the constant."""

    def operation(x: Any, *args: Any, **kwargs: Any) -> Any:
        number = (args[-1] if args else kwargs["fill_value"]) if value is None else value
        return _convert(x.like(number), kwargs.get("dtype"))

    return operation


OPERATIONS: dict[str, Callable[..., Any]] = {
    "truediv": _divide,
    "floordiv": lambda x, other: _divide(x, other, rounding_mode="floor"),
    "mod": _remainder,
    "pow": _power,
    "neg": lambda x: x.add_node(Op.NEG) if x.kind == "f" else 0 - x,
    "pos": lambda x: x,
    "lshift": functools.partial(_shift, operation="mul"),
    "rshift": functools.partial(_shift, operation="floordiv"),
    "abs": lambda x: x.add_node(Op.ABS if x.kind == "f" else Op.IABS),
    "ne": _comparison(Op.EQ, Op.IEQ, negates=True),
    "gt": _comparison(Op.LT, Op.ILT, swaps=True),
    "ge": _comparison(Op.LE, Op.ILE, swaps=True),
    "invert": lambda x: x.add_node(Op.NOT),
    "logical_not": lambda x: x.to_kind("b").add_node(Op.NOT),
    "where": _where,
    "masked_fill": lambda x, condition, value: _where(condition, value, x),
    "min": _extreme(Op.MIN),
    "max": _extreme(Op.MAX),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: _clamp(x, min_val, max_val),
    "floor": lambda x: x.add_node(Op.FLOOR) if x.kind == "f" else x,
    "ceil": lambda x: -(-x).floor(),
    "trunc": _truncate,
    "round": _round,
    "frac": lambda x: x - _truncate(x),
    "fmod": lambda x, other: x - _divide(x, other, rounding_mode="trunc") * other,
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
    "to": _convert,
    "clone": lambda x: x,
    # A selection between a number and itself has no derivative, see Graph.
    "detach": lambda x: x.tracer.number(True).add_node(Op.SELECT, x, x, kind=x.kind),
    "full_like": _fill(None),
    "zeros_like": _fill(0),
    "ones_like": _fill(1),
}
for _name in "add sub mul".split():
    OPERATIONS[_name] = _arithmetic(Op[_name.upper()], Op["I" + _name.upper()])
for _name in "eq lt le".split():
    OPERATIONS[_name] = _comparison(Op[_name.upper()], Op["I" + _name.upper()])
for _name in "exp exp2 expm1 log log1p tanh sigmoid sqrt sin cos erf".split():
    OPERATIONS[_name] = _unary(Op[_name.upper()])
for _name in "and or xor".split():
    OPERATIONS[_name] = _bitwise(Op[_name.upper()], False)
    OPERATIONS[f"logical_{_name}"] = _bitwise(Op[_name.upper()], True)
for _pair in (
    "div=truediv divide=truediv true_divide=truediv floor_divide=floordiv remainder=mod "
    "multiply=mul subtract=sub negative=neg absolute=abs minimum=min maximum=max clip=clamp "
    "bitwise_and=and bitwise_or=or bitwise_xor=xor bitwise_not=invert type=to type_as=to "
    "new_zeros=zeros_like new_ones=ones_like new_full=full_like fix=trunc arcsin=asin arccos=acos "
    "arctan=atan arctan2=atan2 bitwise_left_shift=lshift bitwise_right_shift=rshift positive=pos "
    "log_sigmoid=logsigmoid"
).split():
    _alias, _, _known_name = _pair.partition("=")
    OPERATIONS[_alias] = OPERATIONS[_known_name]
for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    OPERATIONS[f"r{_name}"] = _swap_operands(_name)
for _name in "float double half bfloat16 int long bool".split():
    OPERATIONS[_name] = functools.partial(_convert, dtype=getattr(torch, _name))


def _dot(x: Any, y: Any) -> Any:
    """The inner product of two rows."""
    return Row.apply(x.tracer, "mul", (x, y), {}).reduce(operator.add)


# Operations on whole rows. All others are applied to each element.
OF_ROWS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, dim=-1, **named: x.reduce(operator.add, dim, **named),
    "mean": lambda x, dim=-1, **named: x.reduce(operator.add, dim, **named) / x.shape[0],
    "amax": lambda x, dim=-1, **named: x.reduce(torch.maximum, dim, **named),
    "amin": lambda x, dim=-1, **named: x.reduce(torch.minimum, dim, **named),
    "norm": lambda x, p=2, dim=-1: _norm(x, p, dim),
    **dict.fromkeys("dot vdot inner matmul".split(), _dot),
}


def _norm(x: Any, p: Any, dim: Any) -> Any:
    """The Euclidean norm of a row."""
    if p != 2:
        raise TypeError(f"p={p!r}")
    return Row.apply(x.tracer, "square", (x,), {}).reduce(operator.add, dim).sqrt()
