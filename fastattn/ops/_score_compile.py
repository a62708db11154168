"""Score programs: the graph of a traced function, its derivative, and its steps over registers."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fastattn.backends._score_program import FIELDS, HEADER, NAMED, Flag, Op

# The first two nodes, and their registers: the score, and the gradient of the function's result.
SCORE, _GRAD = 0, 1
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
        self.node_numbers: dict[_Node, int] = {}
        self.gathers: dict[int, Gather] = {}

    def add(self, op: Op, *args: int, numbers: tuple[int, ...] = (), level: int = -1) -> int:
        """Add a node, unless an equal one exists; return its number.

        Sums and quotients are reordered so that more of their parts are equal for all keys, and are
        computed only once.
        """
        if op is Op.DIV and self._can_hoist(*args):
            op, args = Op.MUL, (args[0], self.add(Op.DIV, self.const(1.0), args[1]))
        elif op is Op.IADD and self._can_hoist(*args) and self.nodes[args[0]].op is Op.ISUB:
            first, second = self.nodes[args[0]].args
            op, args = Op.ISUB, (self.add(Op.IADD, first, args[1]), second)
        if level < 0:
            level = _LEVELS.get(op, 0)
            for n in args:
                level |= self.nodes[n].level
        sums = op is Op.REDUCE and level & _KEYS == 0
        node = _Node(op, args, numbers, level, sums or any(self.nodes[n].late for n in args))
        if node not in self.node_numbers:
            self.node_numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.node_numbers[node]

    def _can_hoist(self, a: int, b: int) -> bool:
        """Whether b is the same for all pairs, and a differs between keys."""
        return self.nodes[a].level & _KEYS > 0 and self.nodes[b].level == 0

    def const(self, number: float) -> int:
        """The node of a floating constant."""
        return self.add(Op.CONST, numbers=struct.unpack("<ii", struct.pack("<d", number)))

    def constant_value(self, n: int) -> float:
        """The value of a floating constant."""
        number: float = struct.unpack("<d", struct.pack("<ii", *self.nodes[n].numbers))[0]
        return number

    def integer(self, number: int) -> int:
        """The node of an integer constant."""
        return self.add(Op.INT, numbers=(number,))

    def write_program(self, value: int, targets: Collection[int], size_count: int) -> list[int]:
        """Return the words of the program, up to the numbers that each call fills in.

        ``value`` is the node of the result, ``targets`` are the captured tensors whose gradients
        are needed, and ``size_count`` is how many numbers a call fills in. The layout is in
        ``backends/_score_program.py``.
        """
        gradient, scatters = self._derive(value, targets)
        flags = Flag.DERIVES if gradient != _GRAD or scatters else Flag(0)
        if scatters:
            flags |= Flag.SCATTERS
        steps = _Steps(self.nodes)
        value_register, forward = steps.write(value)
        gradient_register, backward = (
            steps.write(gradient, scatters) if flags else (_GRAD, [[]] * 3)
        )
        sections = [*forward[:2], *backward]
        if len(steps.levels) > _MOST_REGISTERS or max(map(len, sections)) > _MOST_STEPS:
            raise NotImplementedError(
                f"flex_attention: score_mod has too many operations: {len(self.nodes)}"
            )
        results = value_register, gradient_register, int(flags), NAMED + size_count
        header = [len(steps.levels), *map(len, sections), *results]
        assert len(header) == HEADER
        return [*header, *steps.levels, *(n for part in sections for step in part for n in step)]

    def count_disjoint(self, op: Op, targets: Collection[int], tensors: Sequence[Any]) -> int:
        """Count the batch entries (``op`` BATCH) or heads that surely gather different elements.

        Their gradients of ``targets`` can be summed in one buffer without a conflict.
        """
        index_dims: dict[int, set[int]] = {}  # by tensor: dimensions that only this index selects
        for gather in self.gathers.values():
            if gather.captured in targets:
                dims = {dim for dim, n in enumerate(gather.dims) if self.nodes[n].op is op}
                index_dims[gather.captured] = index_dims.get(gather.captured, dims) & dims
        sizes = [[tensors[x].shape[dim] for dim in dims] for x, dims in index_dims.items()]
        return min([max([0, *dims]) for dims in sizes], default=0)

    def _derive(self, value: int, targets: Collection[int]) -> tuple[int, list[tuple[int, int]]]:
        """Differentiate ``value`` in reverse; return the gradient of the score, and the scatters.

        A scatter is a pair of a gather of a captured tensor and its gradient. The gradient of a
        node that is the same for all queries, or keys, is the sum over them.
        """
        differentiable = {SCORE}
        for n, node in enumerate(self.nodes):
            gather = self.gathers.get(n)
            is_target = gather is not None and gather.captured in targets
            if is_target or not differentiable.isdisjoint(node.args):
                differentiable.add(n)
            is_detached = node.op is Op.SELECT and node.args[1] == node.args[2]
            if node.op in _FLAT or is_detached:
                differentiable.discard(n)
        contributions: dict[int, list[int]] = {value: [_GRAD]}
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
                for arg, contribution in self._argument_gradients(n, total):
                    if arg in differentiable:
                        contributions.setdefault(arg, []).append(contribution)
        return gradient, scatters

    def _sum_contributions(self, contributions: list[int], level: int) -> int:
        """Add the sum of what the uses of a node of this level contribute to its gradient."""
        by_level: dict[int, int] = {}
        for n in contributions:
            n_level = self.nodes[n].level
            by_level[n_level] = self.add(Op.ADD, by_level[n_level], n) if n_level in by_level else n
        sums = [
            n if n_level == level else self.add(Op.REDUCE, n, level=level)
            for n_level, n in by_level.items()
        ]
        total = sums[0]
        for n in sums[1:]:
            total = self.add(Op.ADD, total, n)
        return total

    def _argument_gradients(self, n: int, g: int) -> list[tuple[int, int]]:
        """Return (argument, contribution to its gradient) of node n, whose gradient is ``g``."""
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
        if op in (Op.MIN, Op.MAX):  # equal arguments get half of the gradient each
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
        if op is Op.POW:  # as in PyTorch, 0 and not NaN for a if b is 0, and for b if a is 0
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
    """Writes nodes as steps over registers.

    The register of a node that differs between keys is reused after the node's last use; all other
    nodes keep their registers.
    """

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self._nodes = nodes
        self.levels = [_QUERIES | _KEYS] * 2

    def write(
        self, result: int, scatters: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, list[list[tuple[int, ...]]]]:
        """Return the register of ``result``, and three lists of steps.

        The steps of the first run before all keys, of the second for each group of keys, of the
        third after all keys.
        """
        nodes, schedule = self._nodes, self._schedule(result, scatters)
        last_use = {x: step for step, (_, n, args, _) in enumerate(schedule[1]) for x in (n, *args)}
        registers, free = {SCORE: SCORE, _GRAD: _GRAD}, dict[int, list[int]]()
        steps: list[list[tuple[int, ...]]] = [[], [], []]
        for part, section_steps in zip(schedule, steps, strict=True):
            for step, (op, n, args, numbers) in enumerate(part):
                operands = [registers[arg] for arg in args]
                for arg in dict.fromkeys(args):
                    is_temporary = nodes[arg].level & _KEYS and arg > _GRAD and arg != result
                    if part is schedule[1] and is_temporary and last_use[arg] == step:
                        free.setdefault(nodes[arg].level, []).append(registers[arg])
                if n not in registers:
                    registers[n] = self._allocate_register(nodes[n].level, free)
                if op is Op.REDUCE and not nodes[n].level & _KEYS:  # sums begin with 0
                    steps[0].append((Op.CONST, registers[n], 0, 0, 0))
                section_steps.append((op, registers[n], *operands, *numbers, 0, 0, 0)[:FIELDS])
        return registers[result], steps

    def _allocate_register(self, level: int, free: dict[int, list[int]]) -> int:
        """Return a register of a level: a free one, or a new one."""
        if level & _KEYS and free.get(level):
            return free[level].pop()
        self.levels.append(level)
        return len(self.levels) - 1

    def _schedule(self, result: int, scatters: Sequence[tuple[int, int]]) -> list[list[_Item]]:
        """Sort the nodes that ``result`` and ``scatters`` need by when they are computed.

        Return those to compute before all keys, for each group of keys, and after all keys.
        """
        nodes, before, each, after = self._nodes, list[_Item](), list[_Item](), list[_Item]()
        needed, pending = set[int](), [result]
        for gather, gradient in scatters:
            pending += [gradient, *nodes[gather].args]
        while pending:
            n = pending.pop()
            if n not in needed:
                needed.add(n)
                pending += nodes[n].args
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
