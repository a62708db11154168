"""Fused attention for PyTorch: drop-in for its attention function and its attention module."""

import importlib
from typing import TYPE_CHECKING, Any

from fastattn import bias, compat, masks  # noqa: F401  (compat rejects a PyTorch out of range)
from fastattn._version import __version__
from fastattn.dispatch import FallbackWarning, use_backend

# Import all operators: a saved graph may call any operator of torch.ops.fastattn.
from fastattn.ops import (
    additive_attention,
    attention_stats,
    decode_attention,
    encode_memory,
    flex_attention,
    hard_attention,
    hopfield_energy,
    hopfield_retrieve,
    luong_attention,
    memory_hop_attention,
    merge_states,
    scaled_dot_product_attention,
    sinusoidal_encoding,
    sinusoidal_table,
    varlen_attention,
)

if TYPE_CHECKING:
    from fastattn import bench, distributed, flash_attn, integrations, nn, plot  # noqa: F401
    from fastattn._capture import capture
    from fastattn._trace import trace
    from fastattn.explanation import explain
    from fastattn.integrations import accelerate, replace_mha, restore, restore_mha
    from fastattn.nn import MultiheadAttention

__all__ = [
    "FallbackWarning",
    "MultiheadAttention",
    "__version__",
    "accelerate",
    "additive_attention",
    "attention_stats",
    "bias",
    "capture",
    "decode_attention",
    "distributed",
    "encode_memory",
    "explain",
    "flex_attention",
    "hard_attention",
    "hopfield_energy",
    "hopfield_retrieve",
    "luong_attention",
    "masks",
    "memory_hop_attention",
    "merge_states",
    "nn",
    "plot",
    "replace_mha",
    "restore",
    "restore_mha",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "trace",
    "use_backend",
    "varlen_attention",
]

# Imported on first use, because no operator needs them: modules, and names by their module.
_MODULES = frozenset({"bench", "distributed", "flash_attn", "integrations", "nn", "plot"})
_MODULE_OF = {
    "MultiheadAttention": "fastattn.nn",
    "accelerate": "fastattn.integrations",
    "capture": "fastattn._capture",
    "explain": "fastattn.explanation",
    "replace_mha": "fastattn.integrations",
    "restore": "fastattn.integrations",
    "restore_mha": "fastattn.integrations",
    "trace": "fastattn._trace",
}

if not TYPE_CHECKING:  # a type checker would accept any name of a module with __getattr__

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"fastattn.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # the next access finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULE_OF})
