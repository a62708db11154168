"""The layout of a score program, one int32 tensor that says how scores are modified.

A program is a list of steps over registers. A register holds a number of every pair of a tile, or
of what its level says: bit 0 is set if the number differs between queries, bit 1 between keys.
Numbers are floating, integers, or booleans with all bits equal. Register 0 is the score, register 1
the gradient of the modified score.

``HEADER`` words, the level of each register, the steps of five sections, then numbers that depend
on sizes, and captured integers. A step is (op, to, a, b, c). Steps run once a tile (``before``),
once for each group of keys (``each``), or at the end of a tile (``after``):

=============  ======================================================================
word           meaning
=============  ======================================================================
registers      their number
sections       numbers of steps: before, each of the value; before, each, after of the gradient
value          the register of the modified score
gradient       the register of the gradient of the score
flags          see ``Flag``
numbers        how many there are
=============  ======================================================================

The first three numbers are ``batch``: entry n has the index n % batch, because vmap folds examples
before the batch; and how many entries of the batch, and heads, never add to the same element of the
gradient of the data. Steps name the others, sizes and strides of captured tensors, by their places.

The operations, on registers a, b and c unless numbers are named:

==============  ====================================================================
CONST, INT      the double with the words a and b; the integer a
NUMBER          the number at a
BATCH ... KEY   the indices of the pair
GATHER          element B + a of the data, for a register a clamped to C elements, where B and C
                are the numbers at b and c
GATHER_INT      the same of the captured integers
INDEX           C a, for a register a clamped to B elements; below 0 it counts from the end
ADD ... FLOOR   of floating numbers, and SIN ... EXP2; LT, LE, EQ give booleans
IADD ... IEQ    of integers; IDIV is rounded down, and 0 for a divisor of 0; IABS too
AND ... NOT     of the bits
SELECT          b where a, else c; without a derivative if b is c
TO_FLOAT        of an integer; TO_INT rounds towards 0
REDUCE          the sum of a over what `to` does not differ between
SCATTER         the gradient of GATHER: adds the register `to` to element a
==============  ====================================================================

Captured floating tensors are another tensor, one after the other. ``csrc/score_program.h`` reads
the program, ``fastattn/ops/_score_compile.py`` writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import Any

import torch
from torch import Tensor

HEADER, FIELDS = 10, 5
VALUE, FLAGS = 6, 8  # the places of these words
NAMED = 3  # where the numbers that steps name begin, after others


class Flag(IntFlag):
    DERIVES = 1  # the gradient of the score is not that of the modified one, or data has a gradient
    SCATTERS = 2  # data has a gradient


Op = IntEnum(
    "Op",
    "CONST INT BATCH HEAD QUERY KEY GATHER GATHER_INT INDEX ADD SUB MUL DIV NEG ABS MIN MAX EXP "
    "LOG TANH SIGMOID SQRT FLOOR LT LE EQ IADD ISUB IMUL IDIV IMOD ILT ILE IEQ AND OR XOR NOT "
    "SELECT TO_FLOAT TO_INT REDUCE SCATTER IABS SIN COS EXPM1 LOG1P ERF POW ATAN2 EXP2 NUMBER",
    start=0,
)


def evaluate(
    words: Sequence[int],
    named: Sequence[int],  # the numbers that steps name
    data: Tensor | None,
    captured: Tensor | None,  # integers
    score: Tensor,
    indices: Sequence[Any],  # b, h, q, k
) -> Tensor:
    """Return the modified scores, broadcastable to the scores and the indices."""
    registers, before, each = words[:3]  # the number of registers, and of steps
    numbers, start = [0] * NAMED + [*named], HEADER + registers
    steps = words[start : start + FIELDS * (before + each)]
    values: dict[int, Any] = {0: score}
    for place in range(0, len(steps), FIELDS):
        op, to, a, b, c = steps[place : place + FIELDS]
        if op == Op.CONST:
            values[to] = score.new_tensor(struct.unpack("<d", struct.pack("<ii", a, b))[0])
        elif op == Op.INT:
            values[to] = torch.tensor(a, device=score.device)
        elif op == Op.NUMBER:
            values[to] = torch.tensor(numbers[a], device=score.device)
        elif op in (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY):
            values[to] = indices[op - Op.BATCH]
        elif op == Op.INDEX:
            x = values[a]
            values[to] = torch.where(x < 0, x + numbers[b], x).clamp(0, numbers[b] - 1) * numbers[c]
        elif op in (Op.GATHER, Op.GATHER_INT):
            source = data if op == Op.GATHER else captured
            assert source is not None
            values[to] = source[numbers[b] + values[a].clamp(0, numbers[c] - 1)]
            if op == Op.GATHER:
                values[to] = values[to].to(score.dtype)
        elif op == Op.SELECT and b == c:
            values[to] = values[b].detach()
        elif op == Op.SELECT:
            values[to] = torch.where(values[a], *torch.broadcast_tensors(values[b], values[c]))
        elif op == Op.TO_FLOAT:
            values[to] = values[a].to(score.dtype)
        else:
            unary = op in _UNARY
            values[to] = _UNARY[op](values[a]) if unary else _BINARY[op](values[a], values[b])
    result: Tensor = values[words[VALUE]]
    return result


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a.div(torch.where(b == 0, 1, b), rounding_mode="floor"))


_UNARY: dict[int, Callable[..., Tensor]] = {
    **{Op[name.upper()]: getattr(torch, name)
       for name in "abs exp exp2 expm1 log log1p tanh sigmoid sqrt floor sin cos erf".split()},
    Op.NEG: torch.neg, Op.IABS: torch.abs, Op.NOT: torch.bitwise_not,
    Op.TO_INT: lambda x: x.to(torch.int64),
}  # fmt: skip
_BINARY: dict[int, Callable[..., Tensor]] = {
    **{Op[kind + name.upper()]: getattr(torch, name)
       for name in "add sub mul lt le eq".split() for kind in ("", "I")},
    Op.DIV: torch.div, Op.POW: torch.pow, Op.ATAN2: torch.atan2,
    Op.MIN: torch.minimum, Op.MAX: torch.maximum,
    Op.IDIV: _floor_divide, Op.IMOD: lambda a, b: a - _floor_divide(a, b) * b,
    Op.AND: torch.bitwise_and, Op.OR: torch.bitwise_or, Op.XOR: torch.bitwise_xor,
}  # fmt: skip
