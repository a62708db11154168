"""`decode_attention`: attention of the newest tokens to a cache of keys and values; no gradient.

A paged cache has its pages in random order. torch has no paged caches and reads a contiguous one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class Decode(Operator):
    FUNCTION = "decode_attention"
    ABOUT = (
        "the newest Lq tokens and a full cache of Lk, [B, H, Lq, D], [B, Hkv, Lk, D]; with P, in "
        "pages of P keys"
    )
    TORCH = "F.scaled_dot_product_attention on the contiguous cache"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "P": 0}
    PASSES = ("fwd",)
    TINY: ClassVar[Mapping[str, int]] = {**Operator.TINY, "P": 1}
    SHAPES: ClassVar = {"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk D"}
    OUTPUT = "B H Lq D"

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["P"] and sizes["Lk"] % sizes["P"]:
            raise ValueError(f"Lk={sizes['Lk']} is not a multiple of P={sizes['P']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return 4 * pairs * cell["H"] * cell["D"], 0

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell["P"]:
            pages = cell["B"] * cell["Lk"] // cell["P"]
            order = torch.randperm(pages, generator=draw.generator)
            inputs["block_table"] = order.view(cell["B"], -1).int()
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        query, key, value = self.leaves(inputs)
        if not cell["P"]:
            return [query, key, value], {}
        table = inputs["block_table"]
        pages = [_in_pages(x, table, cell["P"]) for x in (key, value)]
        return [query, *pages], {"block_table": table}

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = leaves = self.leaves(inputs)
        grouped = cell["H"] != cell["Hkv"]
        return lambda: (
            scaled_dot_product_attention(query, key, value, enable_gqa=grouped),
        ), leaves

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return attend(*self.leaves(inputs))[:1]


def _in_pages(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, Hkv, Lk, D] as [pages, Hkv, size, D], with each page at its place in the table."""
    pages = cache.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(pages).index_copy_(0, table.flatten().long(), pages)


OP = Decode()
