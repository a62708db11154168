"""`varlen_attention`: attention within packed sequences; torch pads them.

The lengths are those of a padded batch: evenly spaced from a quarter to three quarters of L. With S
they grow by a constant factor from S to L. The cost of padding is not counted. Masks and distances
are those within a sequence; torch gets them as a mask of all pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn import masks
from fastattn.bench.cells import Cell, keys_of, padding_lengths, prefix_length, window_width
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import (
    attend,
    distances,
    document_ids,
    table_biases,
    visible_to_last,
)
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared


class _Varlen(Operator):
    FUNCTION = "varlen_attention"
    ABOUT = "attention within B packed sequences of L/4 to 3L/4, or S to L, [T, H, D], [T, Hkv, D]"
    TORCH = "F.scaled_dot_product_attention on the padded batch, packed again"
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "relative")
    OUTPUT = "T H D"
    BY_EQUATION = True

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["S"] > sizes["L"]:
            raise ValueError(f"S={sizes['S']}, the shortest, is more than L={sizes['L']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs = cell["H"] * sum(len(keys_of(cell, i, n)) for n in _lengths(cell) for i in range(n))
        return 4 * cell["D"] * pairs, 10 * cell["D"] * pairs

    def size(self, cell: Cell, key: str) -> int:
        return sum(_lengths(cell)) if key == "T" else super().size(cell, key)

    def others(self, cell: Cell, draw: Draw) -> Inputs:
        lengths = _lengths(cell)
        inputs = {"ends": torch.tensor([0, *lengths]).cumsum(0)}
        if cell.option == "relative":
            inputs["relative_bias"] = draw.normal(cell["H"], 2 * max(lengths) - 1)
        return inputs

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return [*self.SHAPES, *(["relative_bias"] if cell.option == "relative" else [])]

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        ends = inputs["ends"]
        options: dict[str, Any] = {
            "is_causal": cell.mask == "causal",
            "mask": _mask(cell),
            "relative_bias": inputs.get("relative_bias"),
        }
        return [*self.leaves(inputs), ends, ends], options

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The timing includes padding and packing, which packed inputs and outputs require."""
        leaves, table = self.leaves(inputs), inputs.get("relative_bias")
        longest = max(_lengths(cell))
        lengths = inputs["ends"].diff()
        valid = torch.arange(longest, device=lengths.device) < lengths[:, None]  # [B, L]
        visible = valid[:, None, None]
        for b, n in enumerate(_lengths(cell)):
            square = visible_to_last(cell, n, n, lengths.device)
            if square is not None:  # a row of padding sees all keys of its sequence: no NaN
                visible = visible.expand(-1, -1, longest, -1).contiguous()  # [B, 1, L, L]
                visible[b, 0, :n, :n] = square

        def mask() -> Tensor:
            return visible if table is None else _biases(table, longest, visible)

        ready = mask()

        def padded(x: Tensor) -> Tensor:
            batch = x.new_zeros(*valid.shape, *x.shape[1:])
            return batch.index_put((valid,), x).transpose(1, 2)

        def forward() -> Outputs:
            grouped = cell["H"] != cell["Hkv"]
            query, key, value = (padded(x) for x in leaves)
            added = ready if cell.passes == "fwd" else mask()  # the table has a gradient
            out = scaled_dot_product_attention(query, key, value, added, enable_gqa=grouped)
            return (out.transpose(1, 2)[valid],)

        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def one_by_one(self, cell: Cell, inputs: Inputs) -> Prepared:
        """A loop over the sequences, without padding."""
        leaves, table = self.leaves(inputs), inputs.get("relative_bias")
        lengths, grouped = _lengths(cell), cell["H"] != cell["Hkv"]
        causal = cell.mask == "causal" and table is None  # else a mask says it
        device = inputs["ends"].device
        visible = [None if causal else visible_to_last(cell, n, n, device) for n in lengths]

        def masks_of_all() -> list[Tensor | None]:
            if table is None:
                return visible
            return [_biases(table, n, x) for n, x in zip(lengths, visible, strict=True)]

        ready = masks_of_all()

        def forward() -> Outputs:
            outs = []
            added = ready if cell.passes == "fwd" else masks_of_all()
            for *parts, mask in zip(*(x.split(lengths) for x in leaves), added, strict=True):
                q, k, v = (x.transpose(0, 1)[None] for x in parts)  # [1, H, L, D]
                out = scaled_dot_product_attention(
                    q, k, v, mask, is_causal=causal, enable_gqa=grouped
                )
                outs.append(out[0].transpose(0, 1))
            return (torch.cat(outs),)

        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def equation(self, cell: Cell, inputs: Inputs) -> Tensor:
        """The definition of attention, for each sequence: it has no pairs of two sequences."""
        outs, table = [], inputs.get("relative_bias")
        for parts in zip(*(x.split(_lengths(cell)) for x in self.leaves(inputs)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)  # [1, H, L, D]
            mask = visible_to_last(cell, q.shape[2], q.shape[2], q.device)
            if table is not None:
                mask = _biases(table, q.shape[2], mask)
            outs.append(attend(q, k, v, mask)[0][0].transpose(0, 1))
        return torch.cat(outs)


def _lengths(cell: Cell) -> list[int]:
    batch, shortest, longest = cell["B"], cell["S"], cell["L"]
    if not shortest:
        return padding_lengths(batch, longest)
    step = (longest / shortest) ** (1 / max(batch - 1, 1))
    return [round(longest / step**n) for n in range(batch)]


def _mask(cell: Cell) -> masks.Mask | None:
    """The mask of `fastattn.masks` of the cell, for all of its sequences."""
    lengths = _lengths(cell)
    if cell.mask == "documents":
        return masks.document(torch.cat([document_ids(n) for n in lengths]).to(cell.device))
    if cell.mask == "prefix":
        return masks.prefix_lm(torch.tensor([*map(prefix_length, lengths)], device=cell.device))
    return masks.sliding_window(window_width(cell), 0) if cell.mask == "window" else None


def _biases(table: Tensor, length: int, visible: Tensor | None) -> Tensor:
    """The bias of all pairs of a sequence [1, H, L, L], and -inf where `visible` is False."""
    return table_biases(table, distances(length, length, table.device), visible)


VARLEN = _Varlen(
    SIZES={"B": 16, "H": 8, "Hkv": "H", "L": 256, "S": 0, "D": 64},
    SHAPES={"query": "T H D", "key": "T Hkv D", "value": "T Hkv D"},
)
