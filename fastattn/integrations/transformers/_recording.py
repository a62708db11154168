"""Detects whether transformers records attention weights; it does not pass this as an argument."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def weights_are_recorded(module: nn.Module) -> bool:
    """True within a call of a model with ``output_attentions=True``.

    Some models, such as GPT-2 and SigLIP, do not pass that argument to their layers. transformers
    then records what the layers return. While recording, versions from 5.2 keep a list of the
    weights; earlier versions replace the ``forward`` of ``module``, the attention layer. Up to 5.3
    some models, such as OPT and StableLM, do neither, and get no weights.
    """
    if _collector is None:  # before 5.2
        code = getattr(vars(module).get("forward"), "__code__", None)
        return code is not None and code.co_name == "wrapped_forward"
    # Dynamo cannot follow a ContextVar; transformers keeps the list in a plain attribute for it.
    lists = _collector.global_var if torch.compiler.is_compiling() else _collector.get()
    return lists is not None and any("attentions" in name for name in lists)


def anything_is_recorded() -> bool:
    """True within a call of a model that returns more than its last output."""
    return _collector is not None and bool(_collector.get())


def _find_collector() -> Any:
    """The variable that holds transformers' lists; None before 5.2."""
    try:
        capturing = importlib.import_module("transformers.utils.output_capturing")
    except ImportError:
        return None
    return getattr(capturing, "_active_collector", None)


_collector: Any = _find_collector()  # when imported, because Dynamo cannot trace an import
