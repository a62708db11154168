"""Score programs that are options of attention, whose kernels interpret nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._score_program import Op, evaluate
from fastattn.ops._score_compile import SCORE, Graph

_INDICES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)


class Known(NamedTuple):
    """A score program that equals a softcap, an added bias, or both."""

    softcap: float | None = None
    bias: int | None = None  # the captured tensor that has an element for each pair
    dims: tuple[int, ...] = ()  # which of b, h, q, k its dimensions are
    table: tuple[int, ...] | None = None  # the program of a table, whose query is a distance

    def reason(self) -> str:
        """Why the call runs as ordinary attention, for ``explain``."""
        names = ["a softcap"] * (self.softcap is not None) + ["a bias"] * (self.bias is not None)
        names += ["a table of distances"] * (self.table is not None)
        return f"score_mod is {' and '.join(names)}, an option of scaled_dot_product_attention"

    def options(
        self, query: Tensor, k_len: int, floating: Sequence[Tensor], numbers: Sequence[int]
    ) -> dict[str, Any] | None:
        """The arguments of attention that do the same; None if the program must be interpreted."""
        arguments: dict[str, Any] = {} if self.softcap is None else {"softcap": self.softcap}
        dtype = torch.promote_types(query.dtype, torch.float32)
        if self.bias is not None:
            x = floating[self.bias]
            if list(x.shape) != [(*query.shape[:3], k_len)[dim] for dim in self.dims]:
                return None
            shape = [x.shape[self.dims.index(n)] if n in self.dims else 1 for n in range(4)]
            arguments["attn_mask"] = x.to(dtype).reshape(shape)
        if self.table is not None:
            heads, max_distance = query.shape[1], max(query.shape[2], k_len, 1) - 1
            head = torch.arange(heads, device=query.device)[:, None]
            distance = torch.arange(-max_distance, max_distance + 1, device=query.device)
            data, no_score = flat(floating, dtype), query.new_zeros(1, dtype=dtype)
            bias = evaluate(self.table, numbers, data, None, no_score, (0, head, distance, 0))
            arguments["relative_bias"] = bias.expand(heads, 2 * max_distance + 1)
        return arguments


def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Join captured floating tensors to one vector, in their order; None if there are none."""
    flattened = [x.reshape(-1).to(dtype) for x in tensors]
    return None if not flattened else flattened[0] if len(flattened) == 1 else torch.cat(flattened)


def known(graph: Graph, value: int) -> Known | None:
    """Recognise a program of the form softcap(score) + bias; None if it has another form."""
    of_score = {SCORE}  # the nodes that depend on the score
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
        added = b if graph.nodes[n].op is Op.ADD else graph.add(Op.NEG, b)
        n, term = a, added if term is None else graph.add(Op.ADD, added, term)
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
    table = _by_distance(graph, term)
    return None if table is None else Known(softcap, table=tuple(table))


def _softcap(graph: Graph, n: int) -> float | None:
    """Return c if the node is c tanh(score / c), else None."""
    outer, cap = _product(graph, n)
    if graph.nodes[outer].op is not Op.TANH:
        return None
    inner, factor = _product(graph, graph.nodes[outer].args[0])
    return cap if inner == SCORE and cap > 0 and abs(factor * cap - 1) <= 1e-15 else None


def _product(graph: Graph, n: int) -> tuple[int, float]:
    """Split a product with a constant into the other factor and the constant.

    Any other node is itself, times 0.
    """
    if graph.nodes[n].op is Op.MUL:
        for a, b in (graph.nodes[n].args, graph.nodes[n].args[::-1]):
            factor = graph.nodes[b]
            if factor.op is Op.CONST:
                return a, graph.number_of(b)
            if factor.op is Op.DIV and all(graph.nodes[x].op is Op.CONST for x in factor.args):
                numerator, denominator = map(graph.number_of, factor.args)
                return a, numerator / denominator if denominator else 0.0
    return n, 0.0


def _by_distance(graph: Graph, n: int) -> list[int] | None:
    """Rewrite a node that depends on the pair only by its distance, query minus key.

    Returns a program whose index of the query is the distance, or None.
    """
    copy_graph, nodes = Graph(), dict[int, int | None]()
    distance = copy_graph.add(Op.QUERY)

    def copied(n: int) -> int | None:
        """The copy of a node, made once; None if it has no copy."""
        if n not in nodes:
            nodes[n] = copy(n)
        return nodes[n]

    def copy(n: int) -> int | None:
        """Copy a node into the new graph; None if it depends on more than the distance."""
        op, args, numbers, _, _ = graph.nodes[n]
        if op in (Op.QUERY, Op.KEY, Op.BATCH) or op is None:
            return None
        if op is Op.ISUB:
            (first, first_shift), (second, second_shift) = (_shifted(graph, arg) for arg in args)
            if {first, second} == {Op.QUERY, Op.KEY}:
                d = distance
                if first is Op.KEY:
                    d = copy_graph.add(Op.ISUB, copy_graph.integer(0), d)
                for shift, sign in ((first_shift, Op.IADD), (second_shift, Op.ISUB)):
                    if shift is not None:
                        own = copied(shift)
                        if own is None:
                            return None
                        d = copy_graph.add(sign, d, own)
                return d
        operands = [x for x in map(copied, args) if x is not None]
        if len(operands) < len(args):
            return None
        own = copy_graph.add(op, *operands, numbers=numbers)
        if n in graph.gathers:
            copy_graph.gathers[own] = graph.gathers[n]
        return own

    result = copied(n)
    return None if result is None else copy_graph.words(result, (), 0)


def _shifted(graph: Graph, n: int) -> tuple[Op | None, int | None]:
    """Split an index with an added constant into the index and the node of the constant."""
    node = graph.nodes[n]
    if node.op is Op.IADD and graph.nodes[node.args[1]].level == 0:
        return graph.nodes[node.args[0]].op, node.args[1]
    return node.op, None
