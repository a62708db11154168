"""xFormers' memory_efficient_attention on CUDA; layout [B, L, H, D].

Written from its documented interface; never run, because it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers import sdpa_reasons
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions

ABOUT = "xFormers: memory_efficient_attention (CUDA)"


def versions() -> dict[str, str]:
    import xformers

    if not torch.cuda.is_available():
        raise ImportError("no CUDA device")
    return {"xformers": xformers.__version__, **torch_versions()}


def why_not(cell: Cell) -> list[str]:
    return sdpa_reasons(
        cell,
        dtypes=("fp32", "bf16", "fp16"),
        passes=("fwd", "bwd", "fwd+bwd"),
        masks=("none", "causal"),
        grouped=False,
        devices=("cuda",),
    )


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    leaves = [inputs[name] for name in ("query", "key", "value")]
    bias = LowerTriangularMask() if cell.mask == "causal" else None

    def forward() -> Outputs:
        packed = (x.transpose(1, 2) for x in leaves)
        return (memory_efficient_attention(*packed, attn_bias=bias).transpose(1, 2),)

    return run_passes(cell, forward, leaves, inputs["grad_out"])
