"""What a PyTorch user writes today: fused attention, the module, a table of sinusoids."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell
from fastattn.bench.providers.modules import prepare_module, torch_versions
from fastattn.bench.providers.passes import Outputs, run_passes

ABOUT = "PyTorch: F.scaled_dot_product_attention, nn.MultiheadAttention, a table of sinusoids"
versions = torch_versions


def why_not(cell: Cell) -> list[str]:
    if cell.op == "sdpa" and cell.weights != "none":
        return ["F.scaled_dot_product_attention returns no weights"]
    return []


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    if cell.op == "mha":
        return prepare_module(nn.MultiheadAttention, cell, inputs)
    if cell.op == "sinusoidal":
        return _prepare_sinusoidal(cell, inputs)
    query, key, value = (inputs[name] for name in ("query", "key", "value"))

    def forward() -> Outputs:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=inputs.get("attn_mask"),
            is_causal=cell.mask == "causal",
            enable_gqa=cell.heads != cell.kv_heads,
        )
        return (out,)

    return run_passes(cell, forward, [query, key, value], inputs["grad_out"])


def _prepare_sinusoidal(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    x, embed = inputs["x"], cell.embed_dim
    exponent = torch.arange(0, embed, 2, dtype=torch.float64) / embed
    angle = torch.arange(cell.q_len, dtype=torch.float64)[:, None] * 10000.0**-exponent
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :embed].to(x.dtype)
    scale = math.sqrt(embed)
    return run_passes(cell, lambda: (x * scale + table,), [x], inputs["grad_out"])
