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
from fastattn.bench.providers import ISAS, sdpa_reasons
from fastattn.bench.providers.passes import Outputs, run_passes, stay_in
from fastattn.dispatch import BACKENDS, PRIORITY, load

Call = Callable[[], Outputs]
Inputs = dict[str, Tensor]


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

    def prepare(self, cell: Cell, inputs: Inputs) -> Call:
        op: Any = ops.get(cell.op)
        theirs = op.one_by_one if self.variant == "loop" else op.theirs
        forward, leaves = theirs(cell, inputs)
        return run_passes(cell, forward, leaves, inputs["grad_out"])


class Eager(Torch):
    ABOUT = "PyTorch, the plain equation: softmax(Q Kᵀ) V with the scores in memory"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        return []

    def prepare(self, cell: Cell, inputs: Inputs) -> Call:
        return run_passes(cell, *ops.get(cell.op).eager(cell, inputs), inputs["grad_out"])


class Compiled(Torch):
    ABOUT = "PyTorch: what the provider torch runs, under torch.compile"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        if cell.op in ops.MODELS:
            return ["whole models are not compiled here"]
        return super().why_not(cell)

    def prepare(self, cell: Cell, inputs: Inputs) -> Call:
        torch.compiler.reset()  # earlier cells would count against the limit of recompilations
        forward, leaves = ops.get(cell.op).theirs(cell, inputs)
        compiled: Call = torch.compile(forward, dynamic=False)
        return run_passes(cell, compiled, leaves, inputs["grad_out"])


class Flex(Torch):
    """FlexAttention; each cell gets its own graph, compiled for its exact sizes."""

    ABOUT = "PyTorch: FlexAttention, torch.compile (on CPUs only the forward)"
    VARIANTS = ()

    def why_not(self, cell: Cell) -> list[str]:
        return sdpa_reasons(
            cell,
            dtypes=("fp32", "bf16", "fp16"),
            passes=("fwd", "bwd", "fwd+bwd") if cell.device == "cuda" else ("fwd",),
            devices=("cpu", "cuda"),
        )

    def prepare(self, cell: Cell, inputs: Inputs) -> Call:
        from torch.nn.attention.flex_attention import flex_attention

        leaves = [inputs[name] for name in ("query", "key", "value")]
        options = _flex_options(cell, inputs)
        torch.compiler.reset()
        attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def forward() -> Outputs:
            return (attend(*leaves, enable_gqa=cell["H"] != cell["Hkv"], **options),)

        return run_passes(cell, forward, leaves, inputs["grad_out"])


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
    device = inputs["query"].device
    block_mask = create_block_mask(visible, batch, None, cell["Lq"], cell["Lk"], device=device)
    return {"block_mask": block_mask}


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

    def prepare(self, cell: Cell, inputs: Inputs) -> Call:
        if self.variant or not _pytorch_is_first(cell):
            stay_in(fastattn.use_backend(self._backend(cell)))
        return run_passes(cell, *ops.get(cell.op).ours(cell, inputs), inputs["grad_out"])

    def _backend(self, cell: Cell) -> str:
        """The first backend of the device; a missing one is reported, not replaced."""
        return self.variant or PRIORITY[cell.device][0]


def _pytorch_is_first(cell: Cell) -> bool:
    attention = "scaled_dot_product_attention"
    row = evidence.choose("backends", cell.device, attention, TORCH_DTYPES[cell.dtype])
    return "torch" in row.use[:1]
