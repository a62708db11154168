"""Every operator and module on the shapes of real models, for pytest-benchmark.

python -m pytest benchmarks/bench_operators.py -k "mha and fp32"
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastattn.bench.cells import Cell
from fastattn.bench.providers import DEFAULT
from fastattn.bench.selection import preset_cells


@pytest.mark.parametrize("provider", DEFAULT)
@pytest.mark.parametrize("cell", preset_cells("all"), ids=lambda cell: cell.name)
def bench_operator(time_cell: Callable[[Cell, str], None], cell: Cell, provider: str) -> None:
    time_cell(cell, provider)
