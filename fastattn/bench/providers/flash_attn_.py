"""The package flash-attn on CUDA; layout [B, L, H, D], bottom-right causal mask.

Written from its documented interface; never run, because it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import sdpa_reasons
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions

ABOUT = "flash-attn: flash_attn_func (CUDA)"


def versions() -> dict[str, str]:
    import flash_attn

    if not torch.cuda.is_available():
        raise ImportError("no CUDA device")
    return {"flash-attn": flash_attn.__version__, **torch_versions()}


def why_not(cell: Cell) -> list[str]:
    passes = ("fwd", "bwd", "fwd+bwd")
    reasons = sdpa_reasons(
        cell, dtypes=("bf16", "fp16"), passes=passes, masks=("none", "causal"), devices=("cuda",)
    )
    if cell.op == "sdpa" and cell.mask == "causal" and cell["Lq"] != cell["Lk"]:
        reasons.append("it aligns the causal diagonal differently when Lq is not Lk")
    return reasons


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    from flash_attn import flash_attn_func

    leaves = [inputs[name] for name in ("query", "key", "value")]

    def forward() -> Outputs:
        packed = (x.transpose(1, 2) for x in leaves)
        return (flash_attn_func(*packed, causal=cell.mask == "causal").transpose(1, 2),)

    return run_passes(cell, forward, leaves, inputs["grad_out"])
