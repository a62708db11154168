"""Score programs: the graph of a traced function, its derivative, and its steps over registers."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fastattn.backends._score_program import FIELDS, HEADER, NAMED, Flag, Op

# The first two nodes, and their registers: the score, and the gradient of the result.
SCORE, _SEED = 0, 1
# Bits of a level: whether a node differs between queries, between keys.
_QUERIES, _KEYS = 1, 2
_LEVELS = {Op.QUERY: _QUERIES, Op.KEY: _KEYS}
_MOST_REGISTERS, _MOST_STEPS = 128, 1024  # kMostRegisters, kMostSteps in csrc/score_program.h


class _Node(NamedTuple):
    op: Op | None  # None: the score, or the gradient of the result
    args: tuple[int, ...]  # nodes
    numbers: tuple[int, ...]  # constants, or places of sizes in the numbers of the call
    level: int
    late: bool  # whether it depends on a sum over the keys, which is known at their end


class Gather(NamedTuple):
    """An element of a captured floating tensor."""

    captured: int  # the index of the tensor
    dims: tuple[int, ...]  # the node of each dimension


class Graph:
    """The nodes of a program. Equal nodes are one, and arguments precede their uses."""

    def __init__(self) -> None:
        self.nodes = [_Node(None, (), (), _QUERIES | _KEYS, False)] * 2
        self.known: dict[_Node, int] = {}
        self.gathers: dict[int, Gather] = {}

    def add(self, op: Op, *args: int, numbers: tuple[int, ...] = (), level: int = -1) -> int:
        """Add a node, unless an equal one exists; return its number.

        Sums and quotients are reordered so that more of them do not differ between keys: such
        nodes are computed once for all keys.
        """
        if op is Op.DIV and self._hoists(*args):
            op, args = Op.MUL, (args[0], self.add(Op.DIV, self.const(1.0), args[1]))
        elif op is Op.IADD and self._hoists(*args) and self.nodes[args[0]].op is Op.ISUB:
            first, second = self.nodes[args[0]].args
            op, args = Op.ISUB, (self.add(Op.IADD, first, args[1]), second)
        if level < 0:
            level = _LEVELS.get(op, 0)
            for n in args:
                level |= self.nodes[n].level
        sums = op is Op.REDUCE and level & _KEYS == 0
        node = _Node(op, args, numbers, level, sums or any(self.nodes[n].late for n in args))
        if node not in self.known:
            self.known[node] = len(self.nodes)
            self.nodes.append(node)
        return self.known[node]

    def _hoists(self, a: int, b: int) -> bool:
        """Whether b is the same for all pairs, and a differs between keys."""
        return self.nodes[a].level & _KEYS > 0 and self.nodes[b].level == 0

    def const(self, number: float) -> int:
        """The node of a floating constant."""
        return self.add(Op.CONST, numbers=struct.unpack("<ii", struct.pack("<d", number)))

    def number_of(self, n: int) -> float:
        """The value of a floating constant."""
        number: float = struct.unpack("<d", struct.pack("<ii", *self.nodes[n].numbers))[0]
        return number

    def integer(self, number: int) -> int:
        """The node of an integer constant."""
        return self.add(Op.INT, numbers=(number,))

    def words(self, value: int, wanted: Collection[int], sizes: int) -> list[int]:
        """Write the program, up to the numbers that each call fills in.

        ``value`` is the node of the result, ``wanted`` are the captured tensors whose gradients are
        needed, ``sizes`` is how many numbers a call fills in. The layout is in
        ``backends/_score_program.py``.
        """
        gradient, scatters = self._derivative(value, wanted)
        flags = Flag.DERIVES if gradient != _SEED or scatters else Flag(0)
        if scatters:
            flags |= Flag.SCATTERS
        steps = _Steps(self.nodes)
        of_value, forward = steps.sections(value)
        of_gradient, backward = steps.sections(gradient, scatters) if flags else (_SEED, [[]] * 3)
        sections = [*forward[:2], *backward]
        if len(steps.levels) > _MOST_REGISTERS or max(map(len, sections)) > _MOST_STEPS:
            raise NotImplementedError(
                f"flex_attention: score_mod has too many operations: {len(self.nodes)}"
            )
        results = of_value, of_gradient, int(flags), NAMED + sizes
        header = [len(steps.levels), *map(len, sections), *results]
        assert len(header) == HEADER
        return [*header, *steps.levels, *(n for part in sections for step in part for n in step)]

    def own(self, op: Op, wanted: Collection[int], tensors: Sequence[Any]) -> int:
        """How many batch entries (``op`` BATCH), or heads, certainly gather different elements.

        Their gradients of the ``wanted`` tensors can be summed in one buffer without a conflict.
        """
        places: dict[int, set[int]] = {}  # the dimensions that the index selects alone
        for gather in self.gathers.values():
            if gather.captured in wanted:
                own = {dim for dim, n in enumerate(gather.dims) if self.nodes[n].op is op}
                places[gather.captured] = places.get(gather.captured, own) & own
        sizes = [[tensors[x].shape[dim] for dim in own] for x, own in places.items()]
        return min([max([0, *own]) for own in sizes], default=0)

    def _derivative(self, value: int, wanted: Collection[int]) -> tuple[int, list[tuple[int, int]]]:
        """The gradient of the score, and (gather, its gradient) of the wanted tensors.

        Reverse differentiation. Where a node is the same for queries or keys, its gradient is a sum
        over them.
        """
        differentiable = {SCORE}
        for n, node in enumerate(self.nodes):
            gather = self.gathers.get(n)
            if (gather and gather.captured in wanted) or not differentiable.isdisjoint(node.args):
                differentiable.add(n)
            if node.op in _FLAT or (node.op is Op.SELECT and node.args[1] == node.args[2]):
                differentiable.discard(n)
        contributions: dict[int, list[int]] = {value: [_SEED]}
        gradient, scatters = self.const(0.0), []
        for n in range(value, -1, -1):
            if n not in contributions or n not in differentiable:
                continue
            total = self._sum_contributions(contributions[n], self.nodes[n].level)
            if n == SCORE:
                gradient = total
            elif n in self.gathers:
                scatters.append((n, total))
            else:
                for arg, contribution in self._backward_of(n, total):
                    if arg in differentiable:
                        contributions.setdefault(arg, []).append(contribution)
        return gradient, scatters

    def _sum_contributions(self, contributions: list[int], level: int) -> int:
        """The gradient of a node of this level: the sum of what its uses contribute."""
        by_level: dict[int, int] = {}
        for n in contributions:
            own = self.nodes[n].level
            by_level[own] = self.add(Op.ADD, by_level[own], n) if own in by_level else n
        sums = [
            n if own == level else self.add(Op.REDUCE, n, level=level)
            for own, n in by_level.items()
        ]
        total = sums[0]
        for n in sums[1:]:
            total = self.add(Op.ADD, total, n)
        return total

    def _backward_of(self, n: int, g: int) -> list[tuple[int, int]]:
        """Pairs of an argument of node n, and what the gradient ``g`` of n adds to its gradient."""
        add, node = self.add, self.nodes[n]
        op, (a, b, c) = node.op, (*node.args, 0, 0, 0)[:3]
        zero, one = self.const(0.0), self.const(1.0)
        if op is Op.ADD:
            return [(a, g), (b, g)]
        if op is Op.SUB:
            return [(a, g), (b, add(Op.NEG, g))]
        if op is Op.MUL:
            return [(a, add(Op.MUL, g, b)), (b, add(Op.MUL, g, a))]
        if op is Op.DIV:
            of_a = add(Op.DIV, g, b)
            return [(a, of_a), (b, add(Op.NEG, add(Op.MUL, of_a, n)))]
        if op is Op.NEG:
            return [(a, add(Op.NEG, g))]
        if op is Op.ABS:
            positive = add(Op.SELECT, add(Op.LT, zero, a), g, zero)
            return [(a, add(Op.SELECT, add(Op.LT, a, zero), add(Op.NEG, g), positive))]
        if op in (Op.MIN, Op.MAX):  # equal arguments share it
            less, same = add(Op.LT, a, b), add(Op.EQ, a, b)
            first, second = (g, zero) if op is Op.MIN else (zero, g)
            half = add(Op.MUL, g, self.const(0.5))
            return [
                (x, add(Op.SELECT, same, half, add(Op.SELECT, less, *shares)))
                for x, shares in ((a, (first, second)), (b, (second, first)))
            ]
        if op is Op.SELECT:
            return [(b, add(Op.SELECT, a, g, zero)), (c, add(Op.SELECT, a, zero, g))]
        if op is Op.EXP:
            return [(a, add(Op.MUL, g, n))]
        if op is Op.EXP2:
            return [(a, add(Op.MUL, g, add(Op.MUL, n, self.const(math.log(2)))))]
        if op is Op.LOG:
            return [(a, add(Op.DIV, g, a))]
        if op is Op.TANH:
            return [(a, add(Op.MUL, g, add(Op.SUB, one, add(Op.MUL, n, n))))]
        if op is Op.SIGMOID:
            return [(a, add(Op.MUL, g, add(Op.MUL, n, add(Op.SUB, one, n))))]
        if op is Op.SIN:
            return [(a, add(Op.MUL, g, add(Op.COS, a)))]
        if op is Op.COS:
            return [(a, add(Op.NEG, add(Op.MUL, g, add(Op.SIN, a))))]
        if op is Op.EXPM1:
            return [(a, add(Op.MUL, g, add(Op.ADD, n, one)))]
        if op is Op.LOG1P:
            return [(a, add(Op.DIV, g, add(Op.ADD, one, a)))]
        if op is Op.ERF:
            slope = add(Op.EXP, add(Op.NEG, add(Op.MUL, a, a)))
            return [(a, add(Op.MUL, g, add(Op.MUL, self.const(2 / math.sqrt(math.pi)), slope)))]
        if op is Op.POW:  # 0 where PyTorch has 0, not NaN: of a^0, and of the exponent of 0
            slope = add(Op.MUL, b, add(Op.POW, a, add(Op.SUB, b, one)))
            of_a = add(Op.SELECT, add(Op.EQ, b, zero), zero, add(Op.MUL, g, slope))
            flat = add(Op.AND, add(Op.EQ, a, zero), add(Op.LE, zero, b))
            slope = add(Op.SELECT, flat, zero, add(Op.MUL, n, add(Op.LOG, a)))
            return [(a, of_a), (b, add(Op.MUL, g, slope))]
        if op is Op.ATAN2:
            square = add(Op.ADD, add(Op.MUL, a, a), add(Op.MUL, b, b))
            shares = (add(Op.DIV, x, square) for x in (b, add(Op.NEG, a)))
            return [(x, add(Op.MUL, g, share)) for x, share in zip((a, b), shares, strict=True)]
        assert op is Op.SQRT
        return [(a, add(Op.DIV, g, add(Op.MUL, self.const(2.0), n)))]


# Operations whose derivative is 0.
_FLAT = {Op.LT, Op.LE, Op.EQ, Op.FLOOR, Op.TO_INT}


class _Steps:
    """Writes nodes as steps over registers. A register is free again after its last use.

    That holds for nodes that differ between keys; all others keep their registers.
    """

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self._nodes = nodes
        self.levels = [_QUERIES | _KEYS] * 2

    def sections(
        self, result: int, scatters: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, list[list[tuple[int, ...]]]]:
        """Return the register of ``result``, and three lists of steps.

        They run before all keys, for each group of keys, and after all keys.
        """
        nodes, parts = self._nodes, self._parts(result, scatters)
        last = {x: at for at, (_, n, args, _) in enumerate(parts[1]) for x in (n, *args)}
        registers, free = {SCORE: SCORE, _SEED: _SEED}, dict[int, list[int]]()
        steps: list[list[tuple[int, ...]]] = [[], [], []]
        for part, written in zip(parts, steps, strict=True):
            for at, (op, n, args, numbers) in enumerate(part):
                operands = [registers[arg] for arg in args]
                for arg in dict.fromkeys(args):
                    each = part is parts[1] and nodes[arg].level & _KEYS and arg > _SEED
                    if each and last[arg] == at and arg != result:
                        free.setdefault(nodes[arg].level, []).append(registers[arg])
                if n not in registers:
                    registers[n] = self._register(nodes[n].level, free)
                if op is Op.REDUCE and not nodes[n].level & _KEYS:  # sums begin with 0
                    steps[0].append((Op.CONST, registers[n], 0, 0, 0))
                written.append((op, registers[n], *operands, *numbers, 0, 0, 0)[:FIELDS])
        return registers[result], steps

    def _register(self, level: int, free: dict[int, list[int]]) -> int:
        """A register of a level: a free one, or a new one."""
        if level & _KEYS and free.get(level):
            return free[level].pop()
        self.levels.append(level)
        return len(self.levels) - 1

    def _parts(self, result: int, scatters: Sequence[tuple[int, int]]) -> list[list[_Item]]:
        """The nodes that ``result`` and ``scatters`` need, by when they are computed."""
        nodes, before, each, after = self._nodes, list[_Item](), list[_Item](), list[_Item]()
        needed, left = set[int](), [result]
        for gather, gradient in scatters:
            left += [gradient, *nodes[gather].args]
        while left:
            n = left.pop()
            if n not in needed:
                needed.add(n)
                left += nodes[n].args
        for n in sorted(needed):
            op, args, numbers, level, late = nodes[n]
            if op is None:
                continue
            for_keys = level & _KEYS or (op is Op.REDUCE and nodes[args[0]].level & _KEYS)
            part = each if for_keys else after if late else before
            part.append((op, n, args, numbers))
        for gather, gradient in scatters:
            part = each if nodes[gather].level & _KEYS else after
            part.append((Op.SCATTER, gradient, nodes[gather].args, nodes[gather].numbers))
        return [before, each, after]


_Item = tuple[Op, int, tuple[int, ...], tuple[int, ...]]  # operation, node, arguments, numbers
