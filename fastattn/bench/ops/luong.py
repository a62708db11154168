"""`luong_attention`: softmax(qᵀ Wᵧ k) V, over all keys or over those within W positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of, visible_keys
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes


class Luong(Operator):
    FUNCTION = "luong_attention"
    ABOUT = (
        "softmax(qᵀ Wᵧ k) V, method general, on [B, Lq, D]; local-m if the half width W < Lk, "
        "local-p around random positions if P=1"
    )
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256, "Dv": "D", "W": "Lk", "P": 0}
    MASKS = ("none", "padding")
    WEIGHTS = ("none", "per-head")
    SHAPES: ClassVar = {
        "query": "B Lq D",
        "key": "B Lk D",
        "value": "B Lk Dv",
        "weight": "D D",
    }
    OUTPUT = "B Lq Dv"

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["P"] > 1:
            raise ValueError(f"P={sizes['P']}: P is 1 for local-p, else 0")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        if _is_local(cell):
            keys, width = cell["Lk"], cell["W"]
            near = sum(
                max(0, min(keys, i + width + 1) - max(0, i - width)) for i in range(cell["Lq"])
            )
            pairs = pairs * near // (cell["Lq"] * keys)
        projection = 2 * cell["B"] * cell["Lq"] * cell["D"] ** 2
        forward = pairs * (2 * cell["D"] + 2 * cell["Dv"]) + projection
        return forward, pairs * (6 * cell["D"] + 4 * cell["Dv"]) + 2 * projection

    def scale(self, cell: Cell, name: str) -> float:
        return 1 / cell["D"] if name == "weight" else 1.0

    def unread(self, cell: Cell) -> int:
        if not _is_local(cell):
            return 0
        queries, width = cell["Lq"], cell["W"]
        near = queries * (2 * width + 1) if cell["P"] else queries + width
        return cell["B"] * max(0, cell["Lk"] - near) * (cell["D"] + cell["Dv"])

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if (visible := visible_keys(cell, draw)) is not None:
            inputs["key_padding_mask"] = ~visible[:, 0]
        if cell["P"]:
            inputs["positions"] = draw.uniform(0, cell["Lk"] - 1, cell["B"], cell["Lq"])
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        local: dict[str, Any] = {}
        if _is_local(cell):
            local = {"window": "local-p" if cell["P"] else "local-m", "D": cell["W"]}
            local["positions"] = inputs.get("positions")
        return [inputs["query"], inputs["key"], inputs["value"]], local | {
            "method": "general",
            "weight": inputs["weight"],
            "key_padding_mask": inputs.get("key_padding_mask"),
            "need_weights": cell.weights != "none",
        }

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value, weight = self.leaves(inputs)
        scores = query @ weight @ key.mT
        visible = None
        if "key_padding_mask" in inputs:
            visible = ~inputs["key_padding_mask"][:, None]
        distance = self.distance(inputs)
        if _is_local(cell):
            near = distance.abs() <= cell["W"]
            visible = near if visible is None else near & visible
        weights = softmax_of(scores, visible).nan_to_num()  # 0 for fully masked rows
        if "positions" in inputs:
            weights = weights * torch.exp(-2 * (distance / cell["W"]) ** 2)
        out = weights @ value
        return (out,) if cell.weights == "none" else (out, weights)

    @staticmethod
    def distance(inputs: Inputs) -> Tensor:
        """[Lq, Lk], or [B, Lq, Lk] with positions: key position minus query position."""
        query, key = inputs["query"], inputs["key"]
        place = inputs.get("positions", torch.arange(query.shape[1], device=query.device))
        return torch.arange(key.shape[1], device=key.device) - place[..., None]


def _is_local(cell: Cell) -> bool:
    return cell["P"] > 0 or cell["W"] < max(cell["Lq"], cell["Lk"])


OP = Luong()
