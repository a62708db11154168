"""PyTorch's FlexAttention, compiled for the cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fastattn.bench.cells import Cell
from fastattn.bench.ops._attention import document_ids
from fastattn.bench.providers import sdpa_reasons
from fastattn.bench.providers.passes import Outputs, run_passes, torch_versions

ABOUT = "PyTorch: FlexAttention, torch.compile (on CPUs only the forward)"
versions = torch_versions


def why_not(cell: Cell) -> list[str]:
    on_gpu = cell.device == "cuda"
    return sdpa_reasons(
        cell,
        dtypes=("fp32", "bf16", "fp16"),
        passes=("fwd", "bwd", "fwd+bwd") if on_gpu else ("fwd",),
        devices=("cpu", "cuda"),
    )


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    options = _options(cell, inputs)
    torch.compiler.reset()  # earlier cells would count against the limit of recompilations
    # Each cell gets its own graph, compiled for its exact sizes.
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward() -> Outputs:
        return (attend(query, key, value, enable_gqa=cell["H"] != cell["Hkv"], **options),)

    return run_passes(cell, forward, [query, key, value], inputs["grad_out"])


def _options(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Any]:
    if cell.mask == "none":
        return {}
    if cell.mask == "bias":
        bias = inputs["attn_mask"]
        return {"score_mod": lambda score, b, h, i, j: score + bias[h, i, j]}
    if cell.mask == "causal":

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

    elif cell.mask == "padding":
        valid = inputs["attn_mask"][:, 0, 0]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return valid[b, j]

    elif cell.mask == "documents":
        q_ids, k_ids = (document_ids(cell[key]).to(cell.device) for key in ("Lq", "Lk"))

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return q_ids[i] == k_ids[j]

    else:
        mask = inputs["attn_mask"]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask[i, j]

    batch = cell["B"] if cell.mask == "padding" else None
    block_mask = create_block_mask(
        visible, batch, None, cell["Lq"], cell["Lk"], device=inputs["query"].device
    )
    return {"block_mask": block_mask}
