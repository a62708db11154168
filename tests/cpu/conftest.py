"""What the tests of the CPU's kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from tile_attention import EMULATED, REAL, on

from fastattn.testing import Target


@pytest.fixture(params=[on(EMULATED), on(REAL)])
def tiles(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    isa: str = request.param
    with Target("cpu", isa).active():
        yield isa
