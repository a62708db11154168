"""`nn.MultiheadAttention` and what has its interface: built and fed the same way for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import PARAMETERS, TORCH_DTYPES
from fastattn.bench.providers.passes import Outputs, run_passes


def prepare_module(
    module_class: type[nn.MultiheadAttention], cell: Cell, inputs: dict[str, Tensor]
) -> Callable[[], Outputs]:
    """Self-attention through `module_class`: eval mode for the forward alone, else training."""
    module = module_class(
        cell.embed_dim, cell.heads, batch_first=True, dtype=TORCH_DTYPES[cell.dtype]
    )
    module.load_state_dict({name: inputs[name] for name in PARAMETERS})
    module.train(cell.passes != "fwd")
    x = inputs["x"]

    def forward() -> Outputs:
        out, weights = module(
            x,
            x,
            x,
            key_padding_mask=inputs.get("key_padding_mask"),
            need_weights=cell.weights != "none",
            attn_mask=inputs.get("attn_mask"),
            average_attn_weights=cell.weights != "per-head",
            is_causal=cell.mask == "causal" and cell.weights == "none",
        )
        return (out,) if weights is None else (out, weights)

    parameters = dict(module.named_parameters())
    leaves = [x, *(parameters[name] for name in PARAMETERS)]
    return run_passes(cell, forward, leaves, inputs["grad_out"])


def torch_versions() -> dict[str, str]:
    return {"torch": torch.__version__}
