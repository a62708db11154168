"""What a PyTorch user writes today: fused attention, the module, or the equation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.providers.passes import Outputs, run_passes, stay_in, torch_versions

ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, else the equation"
_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
VARIANTS = tuple(_BACKENDS)  # of scaled_dot_product_attention
_variant = ""
versions = torch_versions


def select(variant: str) -> None:
    global _variant
    _variant = variant
    stay_in(sdpa_kernel(_BACKENDS[variant]))


def why_not(cell: Cell) -> list[str]:
    if _variant and cell.op not in ("sdpa", "mha"):
        return ["it does not call scaled_dot_product_attention"]
    if _variant in ("efficient", "cudnn") and cell.device == "cpu":
        return [f"PyTorch has its {_variant} kernel on GPUs only"]
    return ops.get(cell.op).why_not_theirs(cell)


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    return run_passes(cell, *ops.get(cell.op).theirs(cell, inputs), inputs["grad_out"])
