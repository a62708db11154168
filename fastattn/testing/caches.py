"""Where the sequences of a case lie in its caches: entries, or pages of a block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Places", "places_of"]


class _Case(Protocol):
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def page(self) -> int: ...
    @property
    def shuffled(self) -> bool: ...


@dataclass(frozen=True)
class Places:
    """A cache of ``entries`` of ``page`` keys, and the entries of each sequence."""

    entries: int
    page: int
    table: Tensor  # [B, pages of a sequence]; one column unless the cache is paged


def places_of(case: _Case, draw: torch.Generator) -> Places:
    """Return the places of ``case``: in any order, with three unused entries, or one after another.

    ``page`` is the keys per page, 0 for a cache of ``capacity`` keys per entry.
    """
    batch, page = len(case.lengths), case.page or case.capacity
    pages = -(-case.capacity // page)
    if not (case.page or case.shuffled):
        return Places(batch, page, torch.arange(batch).view(batch, 1))
    order = torch.randperm(batch * pages + 3, generator=draw)
    return Places(len(order), page, order[: batch * pages].view(batch, pages))
