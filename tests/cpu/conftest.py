"""The two ways in which the native core reads tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattn import compat

WAYS = {"interface": compat.exchange_interface, "methods": None}


@pytest.fixture
def exchange(native: ModuleType) -> Iterator[Callable[[Any], bool]]:
    """Choose how the core reads tensors; reset afterwards."""
    yield lambda interface: native.use_torch(torch, interface)
    native.use_torch(torch, compat.exchange_interface)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, exchange: Callable[[Any], bool]) -> None:
    """A way to read tensors."""
    interface = WAYS[request.param]
    if interface is None and request.param == "interface":
        pytest.skip("this PyTorch has no such interface")
    assert exchange(interface) == (interface is not None)
