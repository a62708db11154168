"""Calls of ``decode_attention``, and invalid calls, refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import decode_attention
from fastattn.backends.reference import quantise

LENGTHS = torch.tensor([4, 0, 9])
_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")


def cache_operands(
    layout: str = "bhnd",
    *,
    queries: int = 2,
    capacity: int = 12,
    cached: torch.dtype | None = None,
    paged: bool = False,
    dtype: torch.dtype = torch.float32,
    is_causal: bool = True,
) -> dict[str, Any]:
    """Three sequences in caches of ``capacity`` keys, and two new tokens of each: the same in each
    call. ``cached`` is the dtype of quantised caches; pages hold four keys.
    """
    draw = torch.Generator().manual_seed(0)

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if layout == "bnhd" else x

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(3, heads, length, 8, generator=draw).to(dtype)

    given: dict[str, Any] = {"query": laid_out(normal(4, queries))}
    for name in ("key_cache", "value_cache"):
        parts = {name: normal(2, capacity)}
        if cached is not None:
            numbers, scales = quantise(parts[name], cached)
            filled = torch.arange(capacity) < LENGTHS[:, None, None]
            scales = torch.where(filled, scales, torch.nan)
            parts = {name: numbers, name.replace("cache", "scales"): scales}
        if paged:
            parts = {
                n: x.unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1).flip(0)
                for n, x in parts.items()
            }
        given |= {n: laid_out(x) for n, x in parts.items()}
    given["cache_seqlens"] = LENGTHS
    given |= {name: laid_out(normal(2, 2)) for name in ("key", "value")}
    if paged:
        given["block_table"] = torch.arange(3 * capacity // 4).flip(0).view(3, -1)
    return given | {"layout": layout} | ({"is_causal": True} if is_causal else {})


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
