"""fastattn's reference backend: plain PyTorch, as it runs where nothing native was built."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import ours
from fastattn.bench.providers.passes import Outputs

ABOUT = "fastattn on its reference backend (plain PyTorch)"
versions = ours.versions


def why_not(cell: Cell) -> list[str]:
    return []


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    return ours.prepare_on("reference", cell, inputs)
