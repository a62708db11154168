"""Calls of ``decode_attention`` that must be refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import decode_attention

_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")


def refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    """The call raises this error, and no byte of its caches and scales changes."""
    before = {name: _bytes(given[name]) for name in _WRITTEN if _has_memory(given.get(name))}
    with pytest.raises(error, match=message):
        decode_attention(**given)
    for name, x in before.items():
        assert torch.equal(_bytes(given[name]), x), name


def _has_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().nbytes() > 0


def _bytes(x: Tensor) -> Tensor:
    """A copy of the whole memory that the tensor is part of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.detach().untyped_storage().clone())
