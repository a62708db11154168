"""Helpers of the adapters of memory hops and of Hopfield retrieval."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

__all__ = ["one_memory", "with_rows"]

_Memory = TypeVar("_Memory", Tensor, "Tensor | None")


def one_memory(memory: Tensor) -> bool:
    """Whether the whole batch shares one memory."""
    return memory.shape[0] == 1 or memory.stride(0) == 0


def with_rows(x: _Memory) -> _Memory:
    """Return x with contiguous rows; for a broadcast batch, a copy has only one entry."""
    if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    if x.ndim > 2 and x.stride(0) == 0 and x.shape[0] > 1:
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()
