"""The sinusoidal encoding on the widths of real models, for pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastattn.bench.cells import Cell
from fastattn.bench.presets import preset_cells
from fastattn.bench.providers import DEFAULT

CELLS = [cell for cell in preset_cells("all") if cell.op == "sinusoidal"]


@pytest.mark.parametrize("provider", DEFAULT)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def bench_sinusoidal(time_cell: Callable[[Cell, str], None], cell: Cell, provider: str) -> None:
    time_cell(cell, provider)
