"""`sinusoidal_encoding`: x·√E + PE(position)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes


class Sinusoidal(Operator):
    FUNCTION = "sinusoidal_encoding"
    ABOUT = "x·√E + PE(position) on x [B, L, E]"
    TORCH = "x * sqrt(E) + table[:L]"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 512, "E": 512}
    SHAPES: ClassVar = {"x": "B L E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        elements = cell["B"] * cell["L"] * cell["E"]
        return 2 * elements, elements

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        return [inputs["x"]], {"scale": math.sqrt(cell["E"])}

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        x, scale = inputs["x"], math.sqrt(cell["E"])
        added = table(cell, torch.float64, x.device).to(x.dtype)
        return lambda: (x * scale + added,), [x]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        x = inputs["x"]
        added = table(cell, torch.float64, x.device).to(x.dtype)
        return (x * cell["E"] ** 0.5 + added,)


def table(cell: Cell, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[L, E], with the sine and the cosine of a frequency in adjacent columns."""
    embed = cell["E"]
    position = torch.arange(cell["L"], dtype=dtype, device=device)[:, None]
    halves = torch.arange(0, embed, 2, dtype=dtype, device=device)
    angle = position * 10000.0 ** (-halves / embed)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :embed]


OP = Sinusoidal()
