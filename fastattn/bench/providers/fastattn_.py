"""This library with one backend forced, so that no call falls back silently.

If evidence puts PyTorch's own kernel first, no backend is forced: that is the default for users.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

import fastattn
from fastattn import evidence
from fastattn._version import __version__
from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import TORCH_DTYPES
from fastattn.bench.providers import ISAS
from fastattn.bench.providers.passes import Outputs, run_passes, stay_in, torch_versions
from fastattn.dispatch import BACKENDS, PRIORITY, load, usual_order

ABOUT = "fastattn: its native kernels; @reference: plain PyTorch, as without a native build"
SM_80 = "sm_80"  # the CUDA kernels without those for Hopper
VARIANTS = (*BACKENDS, SM_80, *ISAS)
_forced = ""


def select(variant: str) -> None:
    """Selects a backend; an instruction set was selected when the process started."""
    global _forced
    _forced = "cuda" if variant == SM_80 else variant if variant in BACKENDS else ""
    if variant == SM_80 and not isinstance(load("cuda"), str):
        importlib.import_module("fastattn._cuda").allow_hopper(False)


def versions() -> dict[str, str]:
    return {"fastattn": __version__, **torch_versions()}


def why_not(cell: Cell) -> list[str]:
    backend = load(_backend(cell))
    return [f"the backend {_backend(cell)} is {backend}"] if isinstance(backend, str) else []


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    if _forced or not _pytorch_is_first(cell):
        stay_in(fastattn.use_backend(_backend(cell)))
    return run_passes(cell, *ops.get(cell.op).ours(cell, inputs), inputs["grad_out"])


def _pytorch_is_first(cell: Cell) -> bool:
    attention = "scaled_dot_product_attention"
    found = evidence.choose("backends", cell.device, attention, TORCH_DTYPES[cell.dtype])
    return (usual_order(cell.device) if found is None else found.use)[0] == "torch"


def _backend(cell: Cell) -> str:
    """The first backend of the device; a missing one is reported, not replaced."""
    return _forced or PRIORITY[cell.device][0]
