"""`sinusoidal_table`: PE(0), ..., PE(L − 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes
from fastattn.bench.ops.sinusoidal import table


class SinusoidalTable(Operator):
    FUNCTION = "sinusoidal_table"
    ABOUT = "PE(0), ..., PE(L − 1), [L, E]"
    TORCH = "sin and cos of an outer product, in fp64 and rounded"
    SIZES: ClassVar[Sizes] = {"L": 512, "E": 512}
    PASSES = ("fwd",)
    SHAPES: ClassVar = {}
    OUTPUT = "L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        return cell["L"] * cell["E"], 0  # a sine counts as one operation

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """The table has no input; this tensor carries dtype and device."""
        return {"like": draw.normal(0), **super().inputs(cell, draw)}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        like = inputs["like"]
        return [cell["L"], cell["E"]], {"dtype": like.dtype, "device": like.device}

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        found: Tensor = table(cell, torch.float64, inputs["like"].device)
        return (found.to(inputs["like"].dtype),)


OP = SinusoidalTable()
