"""The inputs of a cell, the same in every process: drawn in fp32, rounded to the cell's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.bench.cells import Cell, padding_lengths

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Parameters of the module and the names their gradients have among the outputs.
PARAMETERS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def output_names(cell: Cell) -> list[str]:
    """The names of what a provider returns for `cell`, in order."""
    names = []
    if cell.passes != "bwd":
        names.append("out")
        if cell.weights != "none":
            names.append("weights")
    if cell.passes != "fwd":
        if cell.op == "sdpa":
            names += ["grad_query", "grad_key", "grad_value"]
        else:
            names.append("grad_x")
        if cell.op == "mha":
            names += [f"grad_{name}" for name in PARAMETERS]
    return names


def make_inputs(cell: Cell, seed: int) -> dict[str, Tensor]:
    """Tensors by name.

    sdpa        query, key, value, attn_mask (True takes part, or added), grad_out
    mha         x, the module's parameters, grad_out,
                key_padding_mask and attn_mask (True is ignored, or added)
    sinusoidal  x, grad_out
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[cell.dtype]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    batch, heads, embed = cell.batch, cell.heads, cell.embed_dim
    if cell.op == "sdpa":
        inputs = {
            "query": normal(batch, heads, cell.q_len, cell.head_dim),
            "key": normal(batch, cell.kv_heads, cell.kv_len, cell.head_dim),
            "value": normal(batch, cell.kv_heads, cell.kv_len, cell.value_dim),
            "grad_out": normal(batch, heads, cell.q_len, cell.value_dim),
        }
        return inputs | _sdpa_mask(cell, generator)
    inputs = {"x": normal(batch, cell.q_len, embed), "grad_out": normal(batch, cell.q_len, embed)}
    if cell.op == "mha":
        inputs |= {
            "in_proj_weight": normal(3 * embed, embed, scale=embed**-0.5),
            "in_proj_bias": normal(3 * embed, scale=0.1),
            "out_proj.weight": normal(embed, embed, scale=embed**-0.5),
            "out_proj.bias": normal(embed, scale=0.1),
        }
        inputs |= _mha_mask(cell, generator)
    return inputs


def _random_visible(cell: Cell, generator: torch.Generator) -> Tensor:
    """[Lq, Lk], half of it True, at least one True in every row."""
    visible = torch.rand(cell.q_len, cell.kv_len, generator=generator) < 0.5
    rows = torch.arange(cell.q_len)
    visible[rows, rows % cell.kv_len] = True
    return visible


def _valid_keys(cell: Cell) -> Tensor:
    """[B, Lk], True where the key is not padding."""
    return torch.arange(cell.kv_len) < torch.tensor(padding_lengths(cell))[:, None]


def _bias(cell: Cell, generator: torch.Generator) -> Tensor:
    """[H, Lq, Lk], as a learnt relative position bias has it."""
    bias = torch.randn(cell.heads, cell.q_len, cell.kv_len, generator=generator)
    return bias.to(TORCH_DTYPES[cell.dtype])


def _sdpa_mask(cell: Cell, generator: torch.Generator) -> dict[str, Tensor]:
    if cell.mask == "padding":
        return {"attn_mask": _valid_keys(cell)[:, None, None, :]}
    if cell.mask == "bool":
        return {"attn_mask": _random_visible(cell, generator)}
    if cell.mask == "bias":
        return {"attn_mask": _bias(cell, generator)}
    return {}


def _mha_mask(cell: Cell, generator: torch.Generator) -> dict[str, Tensor]:
    if cell.mask == "padding":
        return {"key_padding_mask": ~_valid_keys(cell)}
    if cell.mask == "causal":
        return {"attn_mask": torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).triu(1)}
    if cell.mask == "bool":
        return {"attn_mask": ~_random_visible(cell, generator)}
    if cell.mask == "bias":
        # The module wants 3-D masks as [B·H, L, S].
        return {"attn_mask": _bias(cell, generator).repeat(cell.batch, 1, 1)}
    return {}


def true_in_mask(cell: Cell, seed: int) -> int | None:
    """How many pairs the random [Lq, Lk] mask of a `bool` cell lets through, else None."""
    if cell.mask != "bool":
        return None
    mask = make_inputs(cell, seed)["attn_mask"]
    return int((mask if cell.op == "sdpa" else ~mask).sum())
