"""The providers that compute with PyTorch: its own kernels, its compiler, and this library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import evidence
from fastattn._version import __version__
from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import TORCH_DTYPES
from fastattn.bench.ops._attention import document_ids
from fastattn.bench.ops._base import Forward, Inputs, Prepared
from fastattn.bench.providers import ISAS, SdpaOnly
from fastattn.bench.providers.passes import run_passes, stay_in
from fastattn.dispatch import BACKENDS, PRIORITY, load


class Torch:
    """The best that PyTorch has: its fused attention, its module, or the plain equation."""

    ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
    # A kernel of scaled_dot_product_attention, or "loop": a loop over packed sequences.
    VARIANTS: tuple[str, ...] = ("math", "flash", "efficient", "cudnn", "loop")
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

    def prepare(self, cell: Cell, inputs: Inputs) -> Forward:
        return run_passes(cell, *self.calls(cell, inputs), inputs["grad_out"])

    def calls(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The forward that is timed, and the leaves of its gradient."""
        op: Any = ops.get(cell.op)
        prepared: Prepared = (op.one_by_one if self.variant == "loop" else op.theirs)(cell, inputs)
        return prepared


class Eager(Torch):
    ABOUT = "PyTorch, the plain equation: softmax(Q Kᵀ) V with the scores in memory"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        return []

    def calls(self, cell: Cell, inputs: Inputs) -> Prepared:
        return ops.get(cell.op).eager(cell, inputs)


class Compiled(Torch):
    ABOUT = "PyTorch: what the provider torch runs, under torch.compile"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        if cell.op in ops.MODELS:
            return ["whole models are not compiled here"]
        return super().why_not(cell)

    def calls(self, cell: Cell, inputs: Inputs) -> Prepared:
        torch.compiler.reset()  # earlier cells would count against the limit of recompilations
        forward, leaves = super().calls(cell, inputs)
        return torch.compile(forward, dynamic=False), leaves


class Flex(SdpaOnly, Torch):
    """FlexAttention; each cell gets its own graph, compiled for its exact sizes."""

    ABOUT = "PyTorch: FlexAttention, torch.compile (on CPUs only the forward)"
    VARIANTS = ()
    DTYPES = ("fp32", "bf16", "fp16")
    PASSES_ON = {"cpu": ("fwd",), "cuda": ("fwd", "bwd", "fwd+bwd")}  # noqa: RUF012

    def calls(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.flex_attention import flex_attention

        leaves = [inputs[name] for name in ("query", "key", "value")]
        options = _flex_options(cell, inputs)
        torch.compiler.reset()
        attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        grouped = cell["H"] != cell["Hkv"]
        return lambda: (attend(*leaves, enable_gqa=grouped, **options),), leaves


def _flex_options(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = inputs.get("attn_mask", torch.empty(0))
    if cell.mask == "none":
        return {}
    if cell.mask == "bias":
        return {"score_mod": lambda score, b, h, i, j: score + mask[h, i, j]}
    visible: Callable[..., Tensor] = lambda b, h, i, j: mask[i, j]  # noqa: E731
    if cell.mask == "causal":
        visible = lambda b, h, i, j: i >= j  # noqa: E731
    elif cell.mask == "padding":
        valid = mask[:, 0, 0]
        visible = lambda b, h, i, j: valid[b, j]  # noqa: E731
    elif cell.mask == "documents":
        q_ids, k_ids = (document_ids(cell[key]).to(cell.device) for key in ("Lq", "Lk"))
        visible = lambda b, h, i, j: q_ids[i] == k_ids[j]  # noqa: E731
    batch = cell["B"] if cell.mask == "padding" else None
    sizes = batch, None, cell["Lq"], cell["Lk"]
    return {"block_mask": create_block_mask(visible, *sizes, device=inputs["query"].device)}


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
        if not isinstance(backend, str):
            return []
        return [f"the backend {self._backend(cell)} is {backend}"]

    def calls(self, cell: Cell, inputs: Inputs) -> Prepared:
        if self.variant or not _pytorch_is_first(cell):
            stay_in(fastattn.use_backend(self._backend(cell)))
        return ops.get(cell.op).ours(cell, inputs)

    def _backend(self, cell: Cell) -> str:
        """The first backend of the device; a missing one is reported, not replaced."""
        return self.variant or PRIORITY[cell.device][0]


def _pytorch_is_first(cell: Cell) -> bool:
    attention = "scaled_dot_product_attention"
    row = evidence.choose("backends", cell.device, attention, TORCH_DTYPES[cell.dtype])
    return "torch" in row.use[:1]
