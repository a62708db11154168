"""`luong_attention`: softmax(qᵀ W k) v, of all keys or of those at most W places away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of, visible_keys
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Rounded, Sizes


class Luong(Operator):
    FUNCTION = "luong_attention"
    ABOUT = "softmax(qᵀ Wᵧ k) V, method general, on [B, Lq, D]; local-m where the half width W < Lk"
    TORCH = "the equation: torch has no such function"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256, "Dv": "D", "W": "Lk"}
    MASKS = ("none", "padding")
    WEIGHTS = ("none", "per-head")
    LEAVES = ("query", "key", "value", "weight")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        if _is_local(cell):
            keys, width = cell["Lk"], cell["W"]
            near = sum(max(0, min(keys, i + width + 1) - max(0, i - width)) for i in _rows(cell))
            pairs = pairs * near // (cell["Lq"] * keys)
        projection = 2 * cell["B"] * cell["Lq"] * cell["D"] ** 2
        forward = pairs * (2 * cell["D"] + 2 * cell["Dv"]) + projection
        return forward, pairs * (6 * cell["D"] + 4 * cell["Dv"]) + 2 * projection

    def elements(self, cell: Cell) -> tuple[int, int]:
        queries, keys = cell["B"] * cell["Lq"], cell["B"] * cell["Lk"]
        inputs = queries * cell["D"] + keys * (cell["D"] + cell["Dv"]) + cell["D"] ** 2
        return inputs, queries * cell["Dv"]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, width = cell["B"], cell["D"]
        inputs = {
            "query": draw.normal(batch, cell["Lq"], width),
            "key": draw.normal(batch, cell["Lk"], width),
            "value": draw.normal(batch, cell["Lk"], cell["Dv"]),
            "weight": draw.normal(width, width, scale=1 / width),
            "grad_out": draw.normal(batch, cell["Lq"], cell["Dv"]),
        }
        if (visible := visible_keys(cell, draw)) is not None:
            inputs["key_padding_mask"] = ~visible[:, 0]
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        local = {"window": "local-m", "D": cell["W"]} if _is_local(cell) else {}
        return [inputs["query"], inputs["key"], inputs["value"]], local | {
            "method": "general",
            "weight": inputs["weight"],
            "key_padding_mask": inputs.get("key_padding_mask"),
            "need_weights": cell.weights != "none",
        }

    def plain(self, cell: Cell, inputs: Inputs, rounded: Rounded) -> Outputs:
        query, key, value, weight = self.leaves(inputs)
        scores = rounded(rounded(query @ weight) @ key.mT)
        visible = None
        if "key_padding_mask" in inputs:
            visible = ~inputs["key_padding_mask"][:, None]
        if _is_local(cell):
            i, j = (torch.arange(n, device=query.device) for n in scores.shape[1:])
            near = (i[:, None] - j).abs() <= cell["W"]
            visible = near if visible is None else near & visible
        weights = softmax_of(scores, visible, None, rounded).nan_to_num()  # nothing seen: 0
        out = rounded(weights @ value)
        return (out,) if cell.weights == "none" else (out, weights)


def _is_local(cell: Cell) -> bool:
    return cell["W"] < max(cell["Lq"], cell["Lk"])


def _rows(cell: Cell) -> range:
    return range(cell["Lq"])


OP = Luong()
