"""Attention spelled out in PyTorch: the scores are a tensor [B, H, Lq, Lk]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.providers.modules import torch_versions
from fastattn.bench.providers.passes import Outputs, run_passes

ABOUT = "PyTorch, spelled out: softmax(Q Kᵀ) V with the scores in memory"
versions = torch_versions


def why_not(cell: Cell) -> list[str]:
    return [] if cell.op == "sdpa" else ["only sdpa is spelled out"]


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    group = cell.heads // cell.kv_heads
    mask = inputs.get("attn_mask")
    if cell.mask == "causal":
        mask = torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).tril()
    hidden = ~mask if mask is not None and mask.dtype == torch.bool else None

    def forward() -> Outputs:
        scores = query @ key.repeat_interleave(group, 1).mT / math.sqrt(cell.head_dim)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        out = weights @ value.repeat_interleave(group, 1)
        if cell.weights == "none":
            return (out,)
        return out, weights if cell.weights == "per-head" else weights.mean(1)

    return run_passes(cell, forward, [query, key, value], inputs["grad_out"])
