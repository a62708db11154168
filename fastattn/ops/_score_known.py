"""Score programs that are options of attention: their kernels interpret nothing."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._score_program import Op
from fastattn.ops._score_compile import SCORE, Graph

__all__ = ["Known", "known"]

_INDICES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)


class Known(NamedTuple):
    """What a program is: a softcap, then at most one of the others."""

    softcap: float | None = None
    slopes: tuple[Graph, int] | None = None  # minus the slopes of ALiBi
    bias: int | None = None  # the captured tensor that is added, an element a pair
    dims: tuple[int, ...] = ()  # which of b, h, q, k its dimensions are
    sizes: tuple[int, ...] = ()
    table: Callable[[int], tuple[Graph, int]] | None = None  # of distances, from their maximum

    def reason(self) -> str:
        parts = ["a softcap"] * (self.softcap is not None)
        parts += ["ALiBi"] * (self.slopes is not None) + ["a bias"] * (self.bias is not None)
        parts += ["a table of distances"] * (self.table is not None)
        return f"score_mod is {' and '.join(parts)}, an option of scaled_dot_product_attention"

    def options(
        self, query: Tensor, k_len: int, floating: Sequence[Tensor], data: Tensor | None
    ) -> dict[str, Any] | None:
        """The options of a call; None if the program must be interpreted."""
        found: dict[str, Any] = {} if self.softcap is None else {"softcap": self.softcap}
        heads = query.shape[1]
        if self.bias is not None:
            if self.sizes != tuple((*query.shape[:3], k_len)[dim] for dim in self.dims):
                return None
            x = floating[self.bias].to(torch.promote_types(query.dtype, torch.float32))
            shape = [x.shape[self.dims.index(n)] if n in self.dims else 1 for n in range(4)]
            found["attn_mask"] = x.reshape(shape)
        if self.slopes is not None:
            if torch.is_grad_enabled() and any(x.requires_grad for x in floating):
                return None
            found["alibi_slopes"] = -_evaluated(*self.slopes, heads, 1, query, data)[:, 0]
        if self.table is not None:
            most = max(query.shape[2], k_len) - 1
            graph, node = self.table(most)
            found["relative_bias"] = _evaluated(graph, node, heads, 2 * most + 1, query, data)
        return found


def _evaluated(
    graph: Graph, node: int, heads: int, queries: int, query: Tensor, data: Tensor | None
) -> Tensor:
    """The values of a program for all heads and these queries, [heads, queries]."""
    reference = importlib.import_module("fastattn.backends.reference.flex")
    words = graph.forward_words(node, heads)
    program = torch.tensor(words, dtype=torch.int32, device=query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    score = torch.zeros(1, heads, queries, 1, dtype=dtype, device=query.device)
    values: Tensor = reference.modified_scores(program, data, score)
    return values[0, :, :, 0]


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
    if n != SCORE and softcap is None:
        return None
    if term is None:
        return None if softcap is None else Known(softcap)
    gather = graph.gathers.get(term)
    if gather is not None:
        ops = [graph.nodes[d].op for d in gather.dims]
        if len(ops) >= 2 and ops == [op for op in _INDICES if op in ops]:
            dims = tuple(_INDICES.index(op) for op in ops)
            if dims[-2:] == (2, 3):
                return Known(softcap, None, gather.captured, dims, gather.sizes)
    slope = _slope(graph, term)
    if slope is not None:
        return Known(softcap, slope)
    if _by_distance(graph, term, 0) is None:
        return None

    @functools.lru_cache(maxsize=8)
    def table(most: int) -> tuple[Graph, int]:
        return _by_distance(graph, term, most) or (graph, term)

    return Known(softcap, table=table)


def _number(graph: Graph, n: int) -> float | None:
    """A constant, or 1 divided by one."""
    node = graph.nodes[n]
    if node.op is Op.CONST:
        return graph.number_of(n)
    if node.op is not Op.DIV:
        return None
    a, b = (_number(graph, arg) for arg in node.args)
    return None if a is None or not b else a / b


def _softcap(graph: Graph, n: int) -> float | None:
    """c where the node is c tanh(score / c)."""
    found = _product(graph, n)
    if found is None or graph.nodes[found[0]].op is not Op.TANH:
        return None
    inner, cap = _product(graph, graph.nodes[found[0]].args[0]), found[1]
    if inner is None or inner[0] != SCORE or not cap > 0 or abs(inner[1] * cap - 1) > 1e-15:
        return None
    return cap


def _product(graph: Graph, n: int) -> tuple[int, float] | None:
    """The factors of a product, of which one is a number."""
    if graph.nodes[n].op is Op.MUL:
        for a, b in (graph.nodes[n].args, graph.nodes[n].args[::-1]):
            number = _number(graph, b)
            if number is not None:
                return a, number
    return None


def _slope(graph: Graph, n: int) -> tuple[Graph, int] | None:
    """The factor, of each head, where the node is a multiple of abs(q - k)."""
    sign = graph.nodes[n].op is Op.NEG
    product = graph.nodes[graph.nodes[n].args[0]] if sign else graph.nodes[n]
    q, k = graph.add(Op.QUERY), graph.add(Op.KEY)
    distances = (graph.add(Op.ISUB, q, k), graph.add(Op.ISUB, k, q))
    far = {graph.add(Op.TO_FLOAT, graph.add(Op.IABS, d)) for d in distances}
    factors = [arg for arg in product.args if arg not in far]
    if product.op is not Op.MUL or len(factors) != 1:
        return None
    part = graph.add(Op.NEG, factors[0]) if sign else factors[0]
    return _by_distance(graph, part, 0) if graph.nodes[part].level == 0 else None


def _by_distance(graph: Graph, n: int, most: int) -> tuple[Graph, int] | None:
    """The node in a graph whose query i is at the distance i - most; None if it has no distance."""
    made, nodes = Graph(), dict[int, int | None]()
    query, middle = made.add(Op.QUERY), made.integer(most)

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
                shifts = [None if x is None else copied(x) for x in (of_first, of_second)]
                d = made.add(Op.ISUB, *((query, middle)[:: 1 if first is Op.QUERY else -1]))
                for x, sign in zip(shifts, (Op.IADD, Op.ISUB), strict=True):
                    d = d if x is None else made.add(sign, d, x)
                return d
        found = [copied(arg) for arg in args]
        if op is None or None in found:
            return None
        own = made.add(op, *(x for x in found if x is not None), numbers=numbers)
        if n in graph.gathers:
            made.gathers[own] = graph.gathers[n]
        return own

    found = copied(n)
    return None if found is None else (made, found)


def _shifted(graph: Graph, n: int) -> tuple[Op | None, int | None]:
    """An index and what is added to it, None for nothing."""
    node = graph.nodes[n]
    if node.op is Op.IADD and graph.nodes[node.args[1]].level == 0:
        return graph.nodes[node.args[0]].op, node.args[1]
    return node.op, None
