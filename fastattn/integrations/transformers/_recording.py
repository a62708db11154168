"""Whether transformers wants attention weights where it does not tell the attention function."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

__all__ = ["weights_are_recorded"]


def weights_are_recorded(module: nn.Module) -> bool:
    """True within a call of a model with ``output_attentions=True``.

    Some models, GPT-2 and SigLIP among them, do not hand that argument on to their layers.
    transformers records what the layers return: from 5.2 on it has a list for it while it does,
    and before, it replaces the ``forward`` of ``module``, the attention layer, for that time.
    Up to 5.3 some models, OPT and StableLM among them, do neither, and get no weights.
    """
    if _collector is None:
        code = getattr(vars(module).get("forward"), "__code__", None)
        return code is not None and code.co_name == "wrapped_forward"
    # Dynamo cannot follow a ContextVar; transformers keeps the list in a plain attribute for it.
    lists = _collector.global_var if torch.compiler.is_compiling() else _collector.get()
    return lists is not None and any("attentions" in name for name in lists)


def _find_collector() -> Any:
    try:
        capturing = importlib.import_module("transformers.utils.output_capturing")
    except ImportError:
        return None
    return getattr(capturing, "_active_collector", None)


_collector: Any = _find_collector()  # found at import: Dynamo cannot trace one
