"""fastattn's native kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import ours
from fastattn.bench.providers.passes import Outputs

ABOUT = "fastattn: the fused native kernels"
versions = ours.versions


def why_not(cell: Cell) -> list[str]:
    try:
        importlib.import_module("fastattn._cpu")
    except ImportError as error:
        return [f"the native core is not built ({error})"]
    return []


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    return ours.prepare_on("cpu", cell, inputs)
