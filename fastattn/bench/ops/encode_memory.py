"""`encode_memory`: mᵢ = Σⱼ lⱼ ∘ A xᵢⱼ + Tᵢ, the sentences of a memory network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes
from fastattn.ops.encode_memory import encoding_factors


class EncodeMemory(Operator):
    FUNCTION = "encode_memory"
    ABOUT = "mᵢ = Σⱼ lⱼ ∘ A xᵢⱼ + Tᵢ on tokens [B, N, J], A [V, D], T [N, D]"
    TORCH = "(embedding * l * mask).sum(2) + T"
    SIZES: ClassVar[Sizes] = {"B": 32, "N": 50, "J": 11, "V": 175, "D": 50}
    SHAPES: ClassVar = {"weight": "V D", "temporal": "N D"}
    OUTPUT = "B N D"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        sentences = cell["B"] * cell["N"] * cell["D"]
        work = sentences * (2 * cell["J"] + 1)
        return work, work

    def elements(self, cell: Cell) -> tuple[int, int]:
        rows = min(cell["V"], cell["B"] * cell["N"] * cell["J"]) + cell["N"]
        return rows * cell["D"], cell["B"] * cell["N"] * cell["D"]

    def scale(self, cell: Cell, name: str) -> float:
        return 0.1

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        tokens = draw.sentences(cell["B"], cell["N"], cell["J"], cell["V"])
        return {"tokens": tokens, **super().inputs(cell, draw)}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return [inputs["tokens"], inputs["weight"]], {"temporal": inputs["temporal"]}

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        tokens, weight, temporal = inputs["tokens"], inputs["weight"], inputs["temporal"]
        filled = (tokens != 0).any(-1, keepdim=True)
        return (encoded(tokens, weight) + temporal * filled,)


def encoded(tokens: Tensor, table: Tensor) -> Tensor:
    """Σⱼ lⱼ ∘ A xⱼ over the last dimension of `tokens`; token 0 is padding."""
    factors = encoding_factors(
        "position", tokens.shape[-1], table.shape[-1], dtype=table.dtype, device=table.device
    )
    words = torch.nn.functional.embedding(tokens, table) * factors
    return (words * (tokens != 0).unsqueeze(-1)).sum(-2)


OP = EncodeMemory()
