"""The fixture of the pytest-benchmark suite, which checks and times one cell of one provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastattn.bench import providers
from fastattn.bench.cells import Cell, flops, make_inputs, output_names
from fastattn.bench.runner import Oracle

SEED = 0


@pytest.fixture
def time_cell(benchmark: Any) -> Callable[[Cell, str], None]:
    """Times `provider` on `cell` after checking its result."""

    def run(cell: Cell, provider_name: str) -> None:
        provider = providers.load(provider_name)
        if reasons := provider.why_not(cell):
            pytest.skip("; ".join(reasons))
        call = provider.prepare(cell, make_inputs(cell, SEED))
        outputs = dict(zip(output_names(cell), call(), strict=True))
        check = Oracle(cell, SEED).check(outputs)
        assert check.ok, check.reason
        benchmark.group = cell.name
        benchmark.extra_info["flops"] = flops(cell, SEED)
        benchmark(call)

    return run
