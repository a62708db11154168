"""The layout of a score program, one int32 tensor that says how scores are modified.

A program is a list of steps over registers. A register holds a number of every pair of a tile, or
of what its level says: bit 0 is set if the number differs between queries, bit 1 between keys.
Numbers are floating, integers, or booleans with all bits equal. Register 0 is the score, register 1
the gradient of the modified score.

``HEADER`` words, the level of each register, the steps of five sections, then captured integers.
A step is (op, to, a, b, c). Steps run once a tile (``before``), once for each group of keys
(``each``), or at the end of a tile (``after``):

=============  ======================================================================
word           meaning
=============  ======================================================================
batch          entry n has the index n % batch: vmap folds examples before the batch
registers      their number
sections       numbers of steps: before, each of the value; before, each, after of the gradient
value          the register of the modified score
gradient       the register of the gradient of the score
flags          see ``Flag``
integers       the number of captured integers
=============  ======================================================================

The operations, on registers a, b and c unless numbers are named:

==============  ====================================================================
CONST, INT      the double with the words a and b; the integer a
BATCH ... KEY   the indices of the pair
GATHER          element b + a of the data, for a register a clamped to c elements
GATHER_INT      the same of the captured integers
INDEX           c a, for a register a clamped to b elements; below 0 it counts from the end
ADD ... FLOOR   of floating numbers; LT, LE, EQ give booleans
IADD ... IEQ    of integers; IDIV is rounded down, and 0 for a divisor of 0; IABS too
AND ... NOT     of the bits
SELECT          b where a, else c
TO_FLOAT        of an integer; TO_INT rounds towards 0
REDUCE          the sum of a over what `to` does not differ between
SCATTER         the gradient of GATHER: adds the register `to` to element a
==============  ====================================================================

Captured floating tensors are another tensor, one after the other. ``csrc/score_program.h`` reads
the program, ``fastattn/ops/_score_compile.py`` writes it.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = ["FIELDS", "FLAGS", "HEADER", "INTEGERS", "Flag", "Op"]

HEADER = 11
FLAGS, INTEGERS = 9, 10  # their words
FIELDS = 5


class Flag(IntFlag):
    DERIVES = 1  # the gradient of the score is not that of the modified one, or data has a gradient
    SCATTERS = 2  # data has a gradient
    OWN_BATCH = 4  # no two batch entries add to the same element of it
    OWN_HEAD = 8  # no two heads do


Op = IntEnum(
    "Op",
    "CONST INT BATCH HEAD QUERY KEY GATHER GATHER_INT INDEX ADD SUB MUL DIV NEG ABS MIN MAX EXP "
    "LOG TANH SIGMOID SQRT FLOOR LT LE EQ IADD ISUB IMUL IDIV IMOD ILT ILE IEQ AND OR XOR NOT "
    "SELECT TO_FLOAT TO_INT REDUCE SCATTER IABS",
    start=0,
)
