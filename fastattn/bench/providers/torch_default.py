"""The best that PyTorch has: its fused attention, its module, or the plain equation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.ops.varlen import OP as VARLEN
from fastattn.bench.providers.passes import Outputs, run_passes, stay_in, torch_versions

ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# A kernel of scaled_dot_product_attention, or "loop": a loop over packed sequences.
VARIANTS = (*_BACKENDS, "loop")
_variant = ""
versions = torch_versions


def select(variant: str) -> None:
    global _variant
    _variant = variant
    if variant in _BACKENDS:
        stay_in(sdpa_kernel(_BACKENDS[variant]))


def why_not(cell: Cell) -> list[str]:
    if _variant == "loop":
        return [] if cell.op == "varlen" else ["it has no packed sequences to loop over"]
    if _variant and cell.op not in ("sdpa", "mha"):
        return ["it does not call scaled_dot_product_attention"]
    if _variant in ("efficient", "cudnn") and cell.device == "cpu":
        return [f"PyTorch has its {_variant} kernel on GPUs only"]
    return ops.get(cell.op).why_not_theirs(cell)


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    theirs = VARLEN.one_by_one if _variant == "loop" else ops.get(cell.op).theirs
    return run_passes(cell, *theirs(cell, inputs), inputs["grad_out"])
