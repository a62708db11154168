"""`attention_stats`: column sums of the weights; the entropy and the K largest of each query.

The cost is that of the scores, Q Kᵀ; the sums are O(Lq·Lk) and not counted. The backward is not
timed, because it stores the weights, which the function exists to avoid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import fastattn
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend, visible_keys
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class Stats(Operator):
    FUNCTION = "attention_stats"
    ABOUT = (
        "column sums, entropies and the K largest weights a query of softmax(Q Kᵀ / √D), "
        "[B, H, Lq, D], [B, Hkv, Lk, D]"
    )
    SIZES: ClassVar[Sizes] = {
        "B": 1,
        "H": 8,
        "Hkv": "H",
        "Lq": 512,
        "Lk": "Lq",
        "D": 64,
        "K": 0,
    }
    MASKS = ("none", "causal")
    PASSES = ("fwd",)
    TINY: ClassVar[Mapping[str, int]] = {**Operator.TINY, "K": 1}
    SHAPES: ClassVar = {"query": "B H Lq D", "key": "B Hkv Lk D"}
    OUTPUT = "B H Lq"  # and more, see elements

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["K"] > sizes["Lk"]:
            raise ValueError(f"K={sizes['K']} is more than the Lk={sizes['Lk']} keys")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 2 * pairs * cell["H"] * cell["D"], 0

    def elements(self, cell: Cell) -> tuple[int, int]:
        read, queries = super().elements(cell)
        return read, queries * (1 + cell["K"]) + cell["B"] * cell["H"] * cell["Lk"]

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        options = {"is_causal": cell.mask == "causal", "enable_gqa": cell["H"] != cell["Hkv"]}
        return self.leaves(inputs), options | {"top_k": cell["K"]}

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        args, options = self.arguments(cell, inputs)

        def forward() -> Outputs:
            stats = fastattn.attention_stats(*args, **options)
            assert stats.column_sums is not None
            assert stats.entropy is not None
            found = _joined(stats.column_sums, stats.entropy, stats.top_values)
            return (found.to(args[0].dtype),)

        return forward, self.leaves(inputs)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key = self.leaves(inputs)
        visible = visible_keys(cell, Draw(query.dtype, 0))
        _, weights = attend(query, key, key[..., :1], visible)
        entropy = torch.special.entr(weights)
        largest = weights.topk(cell["K"]).values if cell["K"] else None
        return (_joined(weights.sum(-2), entropy.sum(-1), largest),)


def _joined(column_sums: Tensor, entropy: Tensor, largest: Tensor | None) -> Tensor:
    """One output, [B, H, Lk + Lq (1 + K)]."""
    found = [column_sums, entropy] + ([] if largest is None else [largest.flatten(-2)])
    return torch.cat(found, -1)


OP = Stats()
