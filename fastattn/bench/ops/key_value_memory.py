"""`KeyValueMemory`: L queries read from a full memory of N slots."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes
from fastattn.nn import KeyValueMemory


class KeyValue(Operator):
    FUNCTION = "nn.KeyValueMemory"
    ABOUT = "softmax(q Kᵀ / √D) V of queries [B, L, D] and N full slots of D keys and Dv values"
    TORCH = "F.scaled_dot_product_attention"
    SIZES: ClassVar[Sizes] = {"B": 8, "L": 16, "N": 1024, "D": 64, "Dv": "D"}
    SHAPES: ClassVar = {"query": "B L D", "keys": "B N D", "values": "B N Dv"}
    OUTPUT = "B L Dv"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs = cell["B"] * cell["L"] * cell["N"]
        return pairs * 2 * (cell["D"] + cell["Dv"]), pairs * (6 * cell["D"] + 4 * cell["Dv"])

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, keys, values = self.leaves(inputs)
        made: dict[str, Any] = {"device": query.device, "dtype": query.dtype}
        memory = KeyValueMemory(cell["N"], cell["D"], cell["Dv"], batch_size=cell["B"], **made)
        memory.keys, memory.values = keys, values
        memory.used = torch.ones_like(memory.used)
        return lambda: (memory.read(query),), [query, keys, values]

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, keys, values = leaves = self.leaves(inputs)
        return lambda: (functional.scaled_dot_product_attention(query, keys, values),), leaves

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return attend(*self.leaves(inputs))[:1]


OP = KeyValue()
