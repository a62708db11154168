"""`attention_stats`: the sums of the weights over the queries, and the entropy of each query.

The cost is that of the scores, Q Kᵀ; what is summed is O(Lq·Lk) and not counted. No backward is
timed: it keeps the weights, which the function is there to avoid.
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
from fastattn.bench.ops.sdpa import OP as SDPA


class Stats(Operator):
    FUNCTION = "attention_stats"
    ABOUT = "column sums and entropies of softmax(Q Kᵀ / √D), [B, H, Lq, D], [B, Hkv, Lk, D]"
    TORCH = "the equation: torch has no such function"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64}
    MASKS = ("none", "causal")
    PASSES = ("fwd",)
    LEAVES = ("query", "key")

    def check(self, sizes: Mapping[str, int]) -> None:
        SDPA.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 2 * pairs * cell["H"] * cell["D"], 0

    def elements(self, cell: Cell) -> tuple[int, int]:
        batch, heads, width = cell["B"], cell["H"], cell["D"]
        read = batch * (heads * cell["Lq"] + cell["Hkv"] * cell["Lk"]) * width
        return read, batch * heads * (cell["Lq"] + cell["Lk"])

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, width = cell["B"], cell["D"]
        inputs = {
            "query": draw.normal(batch, cell["H"], cell["Lq"], width),
            "key": draw.normal(batch, cell["Hkv"], cell["Lk"], width),
        }
        inputs["grad_out"] = inputs["query"][:0]  # there is no backward
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        grouped = cell["H"] != cell["Hkv"]
        return self.leaves(inputs), {"is_causal": cell.mask == "causal", "enable_gqa": grouped}

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        args, options = self.arguments(cell, inputs)

        def forward() -> Outputs:
            stats = fastattn.attention_stats(*args, **options)
            assert stats.column_sums is not None
            assert stats.entropy is not None
            return (_joined(stats.column_sums, stats.entropy).to(args[0].dtype),)

        return forward, self.leaves(inputs)

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key = self.leaves(inputs)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        visible = visible_keys(cell, Draw(query.dtype, 0))
        _, weights = attend(query, key, key[..., :1], visible, None)
        entropy = torch.special.entr(weights)
        return (_joined(weights.sum(-2), entropy.sum(-1)),)


def _joined(column_sums: Tensor, entropy: Tensor) -> Tensor:
    """One output, [B, H, Lk + Lq]."""
    return torch.cat([column_sums, entropy], -1)


OP = Stats()
