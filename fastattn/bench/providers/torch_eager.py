"""The plain equation in PyTorch: the scores are a tensor [B, H, Lq, Lk]."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions

ABOUT = "PyTorch, the plain equation: softmax(Q Kᵀ) V with the scores in memory"
versions = torch_versions


def why_not(cell: Cell) -> list[str]:
    return []


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    return run_passes(cell, *ops.get(cell.op).eager(cell, inputs), inputs["grad_out"])
