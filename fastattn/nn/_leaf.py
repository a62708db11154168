"""Modules that ``torch.fx.symbolic_trace`` keeps as one node, as it keeps torch.nn's."""

from __future__ import annotations

from typing import Any

import torch


def is_symbolic(x: object) -> bool:
    """Whether x is a value of ``torch.fx.symbolic_trace``."""
    return isinstance(x, torch.fx.Proxy)


def call_as_leaf(module: torch.nn.Module, x: Any, *args: Any, **keywords: Any) -> Any:
    """Add a node that calls ``module`` to the graph of the symbolic ``x``, and return it."""
    options = {name: value for name, value in keywords.items() if value is not None}
    path = x.tracer.path_of_module(module)
    return x.tracer.create_proxy("call_module", path, (x, *args), options)
