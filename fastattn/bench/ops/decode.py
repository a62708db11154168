"""`decode_attention`: the newest tokens against a cache of keys and values; no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.bench.ops.sdpa import OP as SDPA


class Decode(Operator):
    FUNCTION = "decode_attention"
    ABOUT = "the newest Lq tokens against a full cache of Lk, [B, H, Lq, D], [B, Hkv, Lk, D]"
    TORCH = "F.scaled_dot_product_attention"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128}
    PASSES = ("fwd",)
    LEAVES = ("query", "key", "value")

    def check(self, sizes: Mapping[str, int]) -> None:
        SDPA.check(sizes)

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 4 * pairs * cell["H"] * cell["D"], 0

    def elements(self, cell: Cell) -> tuple[int, int]:
        queries = cell["B"] * cell["H"] * cell["Lq"] * cell["D"]
        return queries + 2 * cell["B"] * cell["Hkv"] * cell["Lk"] * cell["D"], queries

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, width = cell["B"], cell["D"]
        inputs = {"query": draw.normal(batch, cell["H"], cell["Lq"], width)}
        inputs["grad_out"] = inputs["query"][:0]  # there is no backward
        for name in ("key", "value"):
            inputs[name] = draw.normal(batch, cell["Hkv"], cell["Lk"], width)
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.leaves(inputs), {}

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = leaves = self.leaves(inputs)
        grouped = cell["H"] != cell["Hkv"]
        return lambda: (
            scaled_dot_product_attention(query, key, value, enable_gqa=grouped),
        ), leaves

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value = self.leaves(inputs)
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return (attend(query, key, value, None, None)[0],)


OP = Decode()
