"""What a PyTorch user writes today: fused attention, the module, or the equation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions

ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
versions = torch_versions


def why_not(cell: Cell) -> list[str]:
    return ops.get(cell.op).why_not_theirs(cell)


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    return run_passes(cell, *ops.get(cell.op).theirs(cell, inputs), inputs["grad_out"])
