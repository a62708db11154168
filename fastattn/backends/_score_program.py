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

Captured floating tensors are another tensor, one after the other. ``csrc/score_program.h`` reads
the program, ``fastattn/ops/_score_compile.py`` writes it.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = ["FIELDS", "HEADER", "Flag", "Op"]

HEADER = 11
FIELDS = 5


class Flag(IntFlag):
    DERIVES = 1  # the gradient of the score is not that of the modified one, or data has a gradient
    SCATTERS = 2  # data has a gradient
    OWN_BATCH = 4  # no two batch entries add to the same element of it
    OWN_HEAD = 8  # no two heads do


class Op(IntEnum):
    CONST = 0  # the double with the words a and b
    INT = 1  # a
    BATCH = 2  # the indices of the pair
    HEAD = 3
    QUERY = 4
    KEY = 5
    GATHER = 6  # data[b + a] for a register a, clamped to c elements
    GATHER_INT = 7  # the same of the captured integers
    INDEX = (
        8  # c times the register a, which counts from the end if negative, clamped to b elements
    )
    ADD = 9
    SUB = 10
    MUL = 11
    DIV = 12
    NEG = 13
    ABS = 14
    MIN = 15
    MAX = 16
    EXP = 17
    LOG = 18
    TANH = 19
    SIGMOID = 20
    SQRT = 21
    FLOOR = 22
    LT = 23
    LE = 24
    EQ = 25
    IADD = 26
    ISUB = 27
    IMUL = 28
    IDIV = 29  # rounded down; 0 for a divisor of 0
    IMOD = 30
    ILT = 31
    ILE = 32
    IEQ = 33
    AND = 34
    OR = 35
    XOR = 36
    NOT = 37
    SELECT = 38  # b where a, else c
    TO_FLOAT = 39
    TO_INT = 40  # rounded towards 0
    REDUCE = 41  # the sum of a over what `to` does not differ between
    SCATTER = 42  # the gradient of GATHER: adds the register `to` to element a
    IABS = 43
