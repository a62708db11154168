"""Masks, weights and the definition of attention, shared by the operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fastattn import masks
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference import attend
from fastattn.bench.cells import DOCUMENTS, Cell, Draw, keys_of, prefix_length, window_width
from fastattn.bench.ops._base import Forward, Inputs

HEADS = {"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk Dv"}


def softmax_weights(
    query: Tensor, key: Tensor, visible: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query keyᵀ · scale), as a user writes it; True in `visible` takes part."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def visible_keys(cell: Cell, draw: Draw) -> Tensor | None:
    """True takes part: [B, 1, Lk] for padding, [Lq, Lk] for bool and causal, else None."""
    queries, keys = (cell.sizes.get(key, cell.sizes.get("L", 0)) for key in ("Lq", "Lk"))
    if cell.mask == "padding":
        return draw.valid(cell["B"], keys)[:, None, :]
    if cell.mask == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).tril()
    if cell.mask == "bool":
        return draw.visible(queries, keys)
    if cell.mask == "documents":
        return document_ids(queries)[:, None] == document_ids(keys)
    return None


def attn_mask(cell: Cell, draw: Draw, *heads: int) -> dict[str, Tensor]:
    """The input `attn_mask` of a function that has `is_causal`, by its name."""
    if cell.mask == "bias":
        return {"attn_mask": draw.normal(*heads, cell["Lq"], cell["Lk"])}
    visible = None if cell.mask == "causal" else visible_keys(cell, draw)
    if visible is None:
        return {}
    return {"attn_mask": visible[:, None] if heads and cell.mask == "padding" else visible}


def visible_to_last(cell: Cell, queries: int, length: int, device: torch.device) -> Tensor | None:
    """The visible pairs of the last queries of a sequence, [queries, length]; None: all."""
    if cell.mask == "none":
        return None
    keys = torch.arange(length)
    first, end = keys_of(cell, keys[length - queries :, None], length)
    return ((first <= keys) & (keys < end)).to(device)


def mask_of(cell: Cell, *lengths: int) -> masks.Mask | None:
    """The mask of `fastattn.masks` of the cell, for one length of all sequences or one of each."""
    if cell.mask == "documents":
        return masks.document(torch.cat([*map(document_ids, lengths)]).to(cell.device))
    if cell.mask == "prefix":
        prefixes = [*map(prefix_length, lengths)]
        several = torch.tensor(prefixes, device=cell.device)
        return masks.prefix_lm(several if len(prefixes) > 1 else prefixes[0])
    return masks.sliding_window(window_width(cell), 0) if cell.mask == "window" else None


def document_ids(length: int) -> Tensor:
    """The document of each row, [length]."""
    return torch.arange(length) * DOCUMENTS // max(length, 1)


def biases(
    table: Tensor, queries: int, keys: int, visible: Tensor | None = None, offset: int = 0
) -> Tensor:
    """The bias of all pairs [1, H, queries, keys], from one of each distance, [H, 2 M + 1].

    -inf where `visible` is False. Query 0 is at position `offset`.
    """
    rows, columns = (torch.arange(n, device=table.device) for n in (queries, keys))
    distances = rows[:, None] + offset - columns
    found = embedding(distances + table.shape[1] // 2, table.mT).permute(2, 0, 1)[None]
    return found if visible is None else found.masked_fill(~visible, -torch.inf)


def unseen(cell: Cell, at: Tensor) -> int:
    """The keys that no query at these positions sees."""
    first, end = keys_of(cell, at, cell["Lk"])
    return cell["Lk"] - int(end.max() - first.min())


def defined(
    x: Mapping[str, Tensor], tensors: Sequence[Tensor], mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The definition of attention: the output, and the weights [B, H, Lq, Lk]."""
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    names = ("alibi_slopes", "sinks", "relative_bias")
    slopes, sinks, table = (x[name][None] if name in x else None for name in names)
    record = AttentionOptions(scale=tensors[0].shape[-1] ** -0.5, **options)
    given: dict[str, Any] = {"keep": x.get("kept"), "sinks": sinks, "relative_bias": table}
    query, key, value = tensors
    out, _, weights = attend(query, key, value, mask, slopes, None, record, **given)
    return out.to(query.dtype), weights.to(query.dtype)


def with_masks(
    cell: Cell,
    x: Inputs,
    lengths: Sequence[tuple[int, int]],
    visible: Sequence[Tensor | None],
    call: Callable[[Sequence[Tensor | None]], Tensor],
) -> Forward:
    """A call of PyTorch, which gets a table of biases as masks: in each call, if it has a gradient.

    `lengths` are the queries and keys of each mask.
    """
    table = x.get("relative_bias")
    if table is None:
        return functools.partial(call, visible)

    def made() -> Sequence[Tensor | None]:
        return [biases(table, *of, seen) for of, seen in zip(lengths, visible, strict=True)]

    return functools.partial(call, made()) if cell.passes == "fwd" else lambda: call(made())
