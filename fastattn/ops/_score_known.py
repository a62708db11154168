"""Score programs that are options of attention, whose kernels interpret nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._score_program import Op, evaluated
from fastattn.ops._score_compile import SCORE, Graph

_INDICES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)


class Known(NamedTuple):
    """What a program is: a softcap, a bias that is added, or both."""

    softcap: float | None = None
    bias: int | None = None  # the captured tensor that has an element for each pair
    dims: tuple[int, ...] = ()  # which of b, h, q, k its dimensions are
    table: tuple[int, ...] | None = None  # the program of a table, whose query is a distance

    def reason(self) -> str:
        parts = ["a softcap"] * (self.softcap is not None) + ["a bias"] * (self.bias is not None)
        parts += ["a table of distances"] * (self.table is not None)
        return f"score_mod is {' and '.join(parts)}, an option of scaled_dot_product_attention"

    def options(
        self, query: Tensor, k_len: int, floating: Sequence[Tensor], numbers: Sequence[int]
    ) -> dict[str, Any] | None:
        """The options of a call; None if the program must be interpreted."""
        found: dict[str, Any] = {} if self.softcap is None else {"softcap": self.softcap}
        dtype = torch.promote_types(query.dtype, torch.float32)
        if self.bias is not None:
            x = floating[self.bias]
            if list(x.shape) != [(*query.shape[:3], k_len)[dim] for dim in self.dims]:
                return None
            shape = [x.shape[self.dims.index(n)] if n in self.dims else 1 for n in range(4)]
            found["attn_mask"] = x.to(dtype).reshape(shape)
        if self.table is not None:
            heads, most = query.shape[1], max(query.shape[2], k_len, 1) - 1
            head = torch.arange(heads, device=query.device)[:, None]
            distance = torch.arange(-most, most + 1, device=query.device)
            data, none = flat(floating, dtype), query.new_zeros(1, dtype=dtype)
            bias = evaluated(self.table, numbers, data, None, none, (0, head, distance, 0))
            found["relative_bias"] = bias.expand(heads, 2 * most + 1)
        return found


def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Captured floating tensors, one after the other."""
    parts = [x.reshape(-1).to(dtype) for x in tensors]
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)


def known(graph: Graph, value: int) -> Known | None:
    """What a program is, None if it is none of these."""
    of_score = {SCORE}
    for n, node in enumerate(graph.nodes):
        if not of_score.isdisjoint(node.args):
            of_score.add(n)
    if value not in of_score or any(node.op is Op.GATHER_INT for node in graph.nodes):
        return None
    term, n = None, value
    while graph.nodes[n].op in (Op.ADD, Op.SUB):
        a, b = graph.nodes[n].args
        if a not in of_score and graph.nodes[n].op is Op.ADD:
            a, b = b, a
        if a not in of_score or b in of_score:
            return None
        part = b if graph.nodes[n].op is Op.ADD else graph.add(Op.NEG, b)
        n, term = a, part if term is None else graph.add(Op.ADD, part, term)
    softcap = None if n == SCORE else _softcap(graph, n)
    if (n != SCORE and softcap is None) or (term is None and softcap is None):
        return None
    if term is None:
        return Known(softcap)
    if gather := graph.gathers.get(term):
        ops = [graph.nodes[d].op for d in gather.dims]
        if ops[-2:] == [Op.QUERY, Op.KEY] and ops == [op for op in _INDICES if op in ops]:
            dims = tuple(_INDICES.index(op) for op in ops)
            return Known(softcap, gather.captured, dims)
    found = _by_distance(graph, term)
    return None if found is None else Known(softcap, table=tuple(found))


def _softcap(graph: Graph, n: int) -> float | None:
    """c where the node is c tanh(score / c)."""
    outer, cap = _product(graph, n)
    if graph.nodes[outer].op is not Op.TANH:
        return None
    inner, factor = _product(graph, graph.nodes[outer].args[0])
    return cap if inner == SCORE and cap > 0 and abs(factor * cap - 1) <= 1e-15 else None


def _product(graph: Graph, n: int) -> tuple[int, float]:
    """The factors of a product, of which one is a number."""
    if graph.nodes[n].op is Op.MUL:
        for a, b in (graph.nodes[n].args, graph.nodes[n].args[::-1]):
            number = graph.nodes[b]
            if number.op is Op.CONST:
                return a, graph.number_of(b)
            if number.op is Op.DIV and all(graph.nodes[x].op is Op.CONST for x in number.args):
                above, below = map(graph.number_of, number.args)
                return a, above / below if below else 0.0
    return n, 0.0


def _by_distance(graph: Graph, n: int) -> list[int] | None:
    """A node as a program whose query is the distance of the pair; None if it has no distance."""
    made, nodes = Graph(), dict[int, int | None]()
    distance = made.add(Op.QUERY)

    def copied(n: int) -> int | None:
        if n not in nodes:
            nodes[n] = copy(n)
        return nodes[n]

    def copy(n: int) -> int | None:
        op, args, numbers, _, _ = graph.nodes[n]
        if op in (Op.QUERY, Op.KEY, Op.BATCH) or op is None:
            return None
        if op is Op.ISUB:
            (first, of_first), (second, of_second) = (_shifted(graph, arg) for arg in args)
            if {first, second} == {Op.QUERY, Op.KEY}:
                d = distance
                if first is Op.KEY:
                    d = made.add(Op.ISUB, made.integer(0), d)
                for shift, sign in ((of_first, Op.IADD), (of_second, Op.ISUB)):
                    if shift is not None:
                        own = copied(shift)
                        if own is None:
                            return None
                        d = made.add(sign, d, own)
                return d
        found = [x for x in map(copied, args) if x is not None]
        if len(found) < len(args):
            return None
        own = made.add(op, *found, numbers=numbers)
        if n in graph.gathers:
            made.gathers[own] = graph.gathers[n]
        return own

    found = copied(n)
    return None if found is None else made.words(found, (), 0)


def _shifted(graph: Graph, n: int) -> tuple[Op | None, int | None]:
    """An index and what is added to it, None for nothing."""
    node = graph.nodes[n]
    if node.op is Op.IADD and graph.nodes[node.args[1]].level == 0:
        return graph.nodes[node.args[0]].op, node.args[1]
    return node.op, None
