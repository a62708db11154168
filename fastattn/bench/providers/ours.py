"""The library itself with one backend forced, so that nothing falls back unseen."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

import fastattn
from fastattn._version import __version__
from fastattn.bench.cells import Cell
from fastattn.bench.providers.modules import prepare_module, torch_versions
from fastattn.bench.providers.passes import Outputs, run_passes


def versions() -> dict[str, str]:
    return {"fastattn": __version__, **torch_versions()}


def prepare_on(backend: str, cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    """The cell's callable on one backend, which raises where it cannot run."""
    # Never left: this process is the provider's own, and entering it in every call would be timed.
    fastattn.use_backend(backend).__enter__()
    return _prepare(cell, inputs)


def _prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Outputs]:
    if cell.op == "mha":
        return prepare_module(fastattn.MultiheadAttention, cell, inputs)
    if cell.op == "sinusoidal":
        x, scale = inputs["x"], math.sqrt(cell.embed_dim)
        return run_passes(
            cell, lambda: (fastattn.sinusoidal_encoding(x, scale=scale),), [x], inputs["grad_out"]
        )
    query, key, value = (inputs[name] for name in ("query", "key", "value"))

    def forward() -> Outputs:
        result = fastattn.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=inputs.get("attn_mask"),
            is_causal=cell.mask == "causal",
            enable_gqa=cell.heads != cell.kv_heads,
            need_weights=cell.weights != "none",
            average_weights=cell.weights == "average",
        )
        return result if isinstance(result, tuple) else (result,)

    return run_passes(cell, forward, [query, key, value], inputs["grad_out"])
