"""The providers that compute with PyTorch: its own kernels, its compiler, and this library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import evidence
from fastattn._version import __version__
from fastattn.bench import ops
from fastattn.bench.cells import TORCH_DTYPES, Cell
from fastattn.bench.providers import ISAS, Outputs, run_passes, stay_in
from fastattn.dispatch import BACKENDS, PRIORITY, load


class Torch:
    """The best that PyTorch has: its fused attention, its module, or the plain equation."""

    ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
    # A kernel of scaled_dot_product_attention, or "loop": a loop over packed sequences.
    VARIANTS: Sequence[str] = ("math", "flash", "efficient", "cudnn", "loop")
    variant = ""

    def select(self, variant: str) -> None:
        self.variant = variant
        if variant != "loop":
            name = "" if variant == "math" else "_ATTENTION"
            stay_in(sdpa_kernel(getattr(SDPBackend, variant.upper() + name)))

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def why_not(self, cell: Cell) -> list[str]:
        if self.variant == "loop":
            return [] if cell.op == "varlen" else ["it has no packed sequences to loop over"]
        if self.variant and cell.op not in ("sdpa", "mha"):
            return ["it does not call scaled_dot_product_attention"]
        if self.variant in ("efficient", "cudnn") and cell.device == "cpu":
            return [f"PyTorch has its {self.variant} kernel on GPUs only"]
        return ops.get(cell.op).why_not_theirs(cell)

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], Outputs]:
        return run_passes(cell, self.forward(cell, inputs), inputs)

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        """The forward pass that is timed."""
        op: Any = ops.get(cell.op)
        found: ops.Forward = (op.one_by_one if self.variant == "loop" else op.theirs)(cell, inputs)
        return found


class Eager(Torch):
    ABOUT = "PyTorch, the plain equation: softmax(Q Kᵀ) V with the scores in memory"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        return []

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        return ops.get(cell.op).eager(cell, inputs)


class Compiled(Torch):
    ABOUT = "PyTorch: what the provider torch runs, under torch.compile"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        if cell.op in ops.MODELS:
            return ["whole models are not compiled here"]
        return super().why_not(cell)

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        torch.compiler.reset()  # earlier cells would count against the limit of recompilations
        return torch.compile(super().forward(cell, inputs), dynamic=False)


class Fastattn(Torch):
    """This library with one backend forced, so that no call falls back silently.

    If evidence puts PyTorch's own kernel first, no backend is forced: that is the default for
    users.
    """

    ABOUT = "fastattn: its native kernels; @reference: plain PyTorch, as without a native build"
    SM_80 = "sm_80"  # the CUDA kernels without those for Hopper
    VARIANTS = (*BACKENDS, SM_80, *ISAS)

    def select(self, variant: str) -> None:
        """Selects a backend; an instruction set was selected when the process started."""
        self.variant = "cuda" if variant == self.SM_80 else variant if variant in BACKENDS else ""
        if variant == self.SM_80 and not isinstance(load("cuda"), str):
            importlib.import_module("fastattn._cuda").allow_hopper(False)

    def versions(self) -> dict[str, str]:
        return {"fastattn": __version__, **super().versions()}

    def why_not(self, cell: Cell) -> list[str]:
        backend = load(self._backend(cell))
        missing = isinstance(backend, str)
        return [f"the backend {self._backend(cell)} is {backend}"] if missing else []

    def forward(self, cell: Cell, inputs: ops.Inputs) -> ops.Forward:
        attention = "scaled_dot_product_attention"
        row = evidence.choose("backends", cell.device, attention, TORCH_DTYPES[cell.dtype])
        if self.variant or "torch" not in row.use[:1]:
            stay_in(fastattn.use_backend(self._backend(cell)))
        return ops.get(cell.op).ours(cell, inputs)

    def _backend(self, cell: Cell) -> str:
        """The first backend of the device; a missing one is reported, not replaced."""
        return self.variant or PRIORITY[cell.device][0]
