"""The library itself with one backend forced, so that nothing falls back unseen."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fastattn
from fastattn._version import __version__
from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions


def versions() -> dict[str, str]:
    return {"fastattn": __version__, **torch_versions()}


def prepare_on(backend: str, cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    """The cell's callable on one backend, which raises where it cannot run."""
    # Never left: this process is the provider's own, and entering it in every call would be timed.
    fastattn.use_backend(backend).__enter__()
    return run_passes(cell, *ops.get(cell.op).ours(cell, inputs), inputs["grad_out"])
