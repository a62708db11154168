"""The masks of cells: the visible keys of each query, as bounds, pairs, or library masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn import masks

if TYPE_CHECKING:
    from fastattn.bench.cells import Cell

DOCUMENTS = 8  # documents per sequence with mask=documents


def lengths(cell: Cell) -> tuple[int, int]:
    """The numbers of queries and keys, 0 for an operator without them."""
    length = cell.sizes.get("L", 0)
    return cell.sizes.get("Lq", length), cell.sizes.get("Lk", length)


def padding_lengths(batch: int, keys: int) -> list[int]:
    """The valid keys of each sequence, evenly spaced from a quarter to three quarters of `keys`."""
    spread = max(batch - 1, 1)
    middle = [0.5] if batch == 1 else [0.25 + 0.5 * b / spread for b in range(batch)]
    return [max(1, round(keys * share)) for share in middle]


def window_width(cell: Cell) -> int:
    """The largest distance of a visible key: W, or with a window a quarter of the keys."""
    return cell.sizes.get("W") or max(1, lengths(cell)[1] // 4)


def document_ids(length: int) -> Tensor:
    """The document of each row, [length]."""
    return torch.arange(length) * DOCUMENTS // max(length, 1)


def limits_keys(cell: Cell) -> bool:
    """Whether `keys_of` may exclude keys."""
    return cell.option == "window" or "W" in cell.sizes or cell.mask not in ("none", "bool", "bias")


def keys_of(cell: Cell, at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The beginning and the end of the visible keys, for the query at each position."""
    first, end = torch.zeros_like(at), torch.full_like(at, length)
    if cell.option == "window" or "W" in cell.sizes:
        first, end = at - window_width(cell), at + window_width(cell) + 1
    elif cell.mask == "window":
        first = at - window_width(cell)
    elif cell.mask == "documents":
        own = at * DOCUMENTS // (at.max() + 1)
        first, end = (-(-number * length // DOCUMENTS) for number in (own, own + 1))
    if cell.mask in ("causal", "window"):
        end = at + 1
    elif cell.mask == "prefix":
        end = (at + 1).clamp(min=length // 2)
    return first.clamp(0, length), end.clamp(max=length)


def visible(cell: Cell, at: Tensor, length: int, device: Any = "cpu") -> Tensor | None:
    """The visible pairs [queries, length] of the queries at these positions; None: all."""
    if not limits_keys(cell):
        return None
    first, end = keys_of(cell, at[:, None], length)
    keys = torch.arange(length)
    return ((first <= keys) & (keys < end)).to(device)


def mask_of(cell: Cell, *lengths: int) -> masks.Mask | None:
    """The cell's mask of `fastattn.masks`, for one length or for one length per sequence."""
    if cell.mask == "documents":
        return masks.document(torch.cat([*map(document_ids, lengths)]).to(cell.device))
    if cell.mask == "prefix":
        prefixes = [length // 2 for length in lengths]
        several = torch.tensor(prefixes, device=cell.device)
        return masks.prefix_lm(several if len(prefixes) > 1 else prefixes[0])
    return masks.sliding_window(window_width(cell), 0) if cell.mask == "window" else None
