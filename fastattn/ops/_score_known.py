"""Score programs that are options of attention, whose kernels interpret nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._score_program import Op, evaluate
from fastattn.ops._score_compile import SCORE, Graph

_INDICES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)


class KnownForm(NamedTuple):
    """A score program that equals a softcap, an added bias, or both."""

    softcap: float | None = None
    bias: int | None = None  # the index of the captured tensor that has an element for each pair
    dims: tuple[int, ...] = ()  # which of b, h, q, k (0 to 3) its dimensions are
    table: tuple[int, ...] | None = None  # a program for a bias table; its query is a distance

    def reason(self) -> str:
        """Why the call runs as ordinary attention, for ``explain``."""
        names = ["a softcap"] * (self.softcap is not None) + ["a bias"] * (self.bias is not None)
        names += ["a table of distances"] * (self.table is not None)
        return f"score_mod is {' and '.join(names)}, an option of scaled_dot_product_attention"

    def attention_arguments(
        self, query: Tensor, k_len: int, floating: Sequence[Tensor], numbers: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return equivalent arguments of attention; None if the program must be interpreted.

        ``floating`` are the captured floating tensors, ``numbers`` the sizes of this call.
        """
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
            data, no_score = join_flat(floating, dtype), query.new_zeros(1, dtype=dtype)
            bias = evaluate(self.table, numbers, data, None, no_score, (0, head, distance, 0))
            arguments["relative_bias"] = bias.expand(heads, 2 * max_distance + 1)
        return arguments


def join_flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Join captured floating tensors to one vector, in their order; None if there are none."""
    flattened = [x.reshape(-1).to(dtype) for x in tensors]
    return None if not flattened else flattened[0] if len(flattened) == 1 else torch.cat(flattened)


def recognise(graph: Graph, value: int) -> KnownForm | None:
    """Recognise a program of the form softcap(score) + bias; None if it has another form."""
    score_nodes = {SCORE}  # the nodes that depend on the score
    for n, node in enumerate(graph.nodes):
        if not score_nodes.isdisjoint(node.args):
            score_nodes.add(n)
    if value not in score_nodes or any(node.op is Op.GATHER_INT for node in graph.nodes):
        return None
    term, n = None, value
    while graph.nodes[n].op in (Op.ADD, Op.SUB):
        a, b = graph.nodes[n].args
        if a not in score_nodes and graph.nodes[n].op is Op.ADD:
            a, b = b, a
        if a not in score_nodes or b in score_nodes:
            return None
        added = b if graph.nodes[n].op is Op.ADD else graph.add(Op.NEG, b)
        n, term = a, added if term is None else graph.add(Op.ADD, added, term)
    softcap = None if n == SCORE else _match_softcap(graph, n)
    if (n != SCORE and softcap is None) or (term is None and softcap is None):
        return None
    if term is None:
        return KnownForm(softcap)
    if gather := graph.gathers.get(term):
        ops = [graph.nodes[d].op for d in gather.dims]
        if ops[-2:] == [Op.QUERY, Op.KEY] and ops == [op for op in _INDICES if op in ops]:
            dims = tuple(_INDICES.index(op) for op in ops)
            return KnownForm(softcap, gather.captured, dims)
    table = _rewrite_by_distance(graph, term)
    return None if table is None else KnownForm(softcap, table=tuple(table))


def _match_softcap(graph: Graph, n: int) -> float | None:
    """Return c if the node is c tanh(score / c), else None."""
    outer, cap = _split_factor(graph, n)
    if graph.nodes[outer].op is not Op.TANH:
        return None
    inner, factor = _split_factor(graph, graph.nodes[outer].args[0])
    return cap if inner == SCORE and cap > 0 and abs(factor * cap - 1) <= 1e-15 else None


def _split_factor(graph: Graph, n: int) -> tuple[int, float]:
    """Split a product with a constant into the other factor and the constant.

    For any other node, return the node and 0, which is no factor of a softcap.
    """
    if graph.nodes[n].op is Op.MUL:
        for a, b in (graph.nodes[n].args, graph.nodes[n].args[::-1]):
            factor = graph.nodes[b]
            if factor.op is Op.CONST:
                return a, graph.constant_value(b)
            if factor.op is Op.DIV and all(graph.nodes[x].op is Op.CONST for x in factor.args):
                numerator, denominator = map(graph.constant_value, factor.args)
                return a, numerator / denominator if denominator else 0.0
    return n, 0.0


def _rewrite_by_distance(graph: Graph, n: int) -> list[int] | None:
    """Rewrite a node that depends on the pair only by its distance, query minus key.

    Return a program that takes the distance as its query, or None for any other node.
    """
    copy_graph, copies = Graph(), dict[int, int | None]()
    distance_node = copy_graph.add(Op.QUERY)

    def copy_of(n: int) -> int | None:
        """Return the copy of a node, which is made once; None if it has none."""
        if n not in copies:
            copies[n] = make_copy(n)
        return copies[n]

    def make_copy(n: int) -> int | None:
        """Copy a node into the new graph; None if it depends on more than the distance."""
        op, args, numbers, _, _ = graph.nodes[n]
        if op in (Op.QUERY, Op.KEY, Op.BATCH) or op is None:
            return None
        if op is Op.ISUB:
            (first, first_shift), (second, second_shift) = (
                _split_shift(graph, arg) for arg in args
            )
            if {first, second} == {Op.QUERY, Op.KEY}:
                node = distance_node
                if first is Op.KEY:
                    node = copy_graph.add(Op.ISUB, copy_graph.integer(0), node)
                for shift, sign in ((first_shift, Op.IADD), (second_shift, Op.ISUB)):
                    if shift is not None:
                        copied_node = copy_of(shift)
                        if copied_node is None:
                            return None
                        node = copy_graph.add(sign, node, copied_node)
                return node
        operands = [x for x in map(copy_of, args) if x is not None]
        if len(operands) < len(args):
            return None
        copied_node = copy_graph.add(op, *operands, numbers=numbers)
        if n in graph.gathers:
            copy_graph.gathers[copied_node] = graph.gathers[n]
        return copied_node

    result = copy_of(n)
    return None if result is None else copy_graph.write_program(result, (), 0)


def _split_shift(graph: Graph, n: int) -> tuple[Op | None, int | None]:
    """Split an index with an added constant into the index and the node of the constant."""
    node = graph.nodes[n]
    if node.op is Op.IADD and graph.nodes[node.args[1]].level == 0:
        return graph.nodes[node.args[0]].op, node.args[1]
    return node.op, None
