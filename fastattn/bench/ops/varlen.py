"""`varlen_attention`: attention within packed sequences; torch pads them.

The lengths are those of a padded batch: evenly spaced from a quarter to three quarters of L. With S
they grow by a constant factor from S to L. The cost of padding is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell, padding_lengths
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class Varlen(Operator):
    FUNCTION = "varlen_attention"
    ABOUT = "attention within B packed sequences of L/4 to 3L/4, or S to L, [T, H, D], [T, Hkv, D]"
    TORCH = "F.scaled_dot_product_attention on the padded batch, packed again"
    SIZES: ClassVar[Sizes] = {"B": 16, "H": 8, "Hkv": "H", "L": 256, "S": 0, "D": 64}
    MASKS = ("none", "causal")
    SHAPES: ClassVar = {"query": "T H D", "key": "T Hkv D", "value": "T Hkv D"}
    OUTPUT = "T H D"

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["S"] > sizes["L"]:
            raise ValueError(f"S={sizes['S']}, the shortest, is more than L={sizes['L']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        lengths = _lengths(cell)
        causal = cell.mask == "causal"
        pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths) * cell["H"]
        return 4 * cell["D"] * pairs, 10 * cell["D"] * pairs

    def size(self, cell: Cell, key: str) -> int:
        return sum(_lengths(cell)) if key == "T" else super().size(cell, key)

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        ends = torch.tensor([0, *_lengths(cell)]).cumsum(0)
        return super().inputs(cell, draw) | {"ends": ends}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        ends = inputs["ends"]
        return [*self.leaves(inputs), ends, ends], {"is_causal": cell.mask == "causal"}

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The timing includes padding and packing, which packed inputs and outputs require."""
        leaves = self.leaves(inputs)
        longest = max(_lengths(cell))
        lengths = inputs["ends"].diff()
        valid = torch.arange(longest, device=lengths.device) < lengths[:, None]  # [B, L]
        mask = valid[:, None, None]
        if cell.mask == "causal":
            mask = mask & torch.ones(longest, longest, dtype=torch.bool, device=mask.device).tril()

        def padded(x: Tensor) -> Tensor:
            batch = x.new_zeros(*valid.shape, *x.shape[1:])
            return batch.index_put((valid,), x).transpose(1, 2)

        def forward() -> Outputs:
            grouped = cell["H"] != cell["Hkv"]
            query, key, value = (padded(x) for x in leaves)
            out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
            return (out.transpose(1, 2)[valid],)

        return forward, leaves

    def one_by_one(self, cell: Cell, inputs: Inputs) -> Prepared:
        """A loop over the sequences, without padding."""
        leaves = self.leaves(inputs)
        lengths = inputs["ends"].diff().tolist()
        causal, grouped = cell.mask == "causal", cell["H"] != cell["Hkv"]

        def forward() -> Outputs:
            outs = []
            for parts in zip(*(x.split(lengths) for x in leaves), strict=True):
                q, k, v = (x.transpose(0, 1)[None] for x in parts)  # [1, H, L, D]
                out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
                outs.append(out[0].transpose(0, 1))
            return (torch.cat(outs),)

        return forward, leaves

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        lengths = inputs["ends"].diff().tolist()
        outs = []
        for parts in zip(*(x.split(lengths) for x in self.leaves(inputs)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)  # [1, H, L, D]
            visible = None
            if cell.mask == "causal":
                visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
            outs.append(attend(q, k, v, visible)[0][0].transpose(0, 1))
        return (torch.cat(outs),)


def _lengths(cell: Cell) -> list[int]:
    batch, shortest, longest = cell["B"], cell["S"], cell["L"]
    if not shortest:
        return padding_lengths(batch, longest)
    step = (longest / shortest) ** (1 / max(batch - 1, 1))
    return [round(longest / step**n) for n in range(batch)]


OP = Varlen()
