"""Masks and attention, shared by the operators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fastattn import masks
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference import attend as defined_attention
from fastattn.bench.cells import DOCUMENTS, Cell, keys_of, prefix_length, window_width
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Operator

PAIRS_CHECKED = 1 << 26
PAIRS_OF_FEW = 1 << 22


class SampledHeads(Operator):
    """An attention with the sizes B, H, Hkv, Lq and Lk; the check of a long one takes a sample."""

    JOINT: Sequence[str] = ()  # options with an input of all heads: they are not sampled

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[tuple[int, ...]]:
        """A sample of (sequence, key head), because they do not depend on each other.

        If the weights are averaged over the heads, a sample of sequences.
        """
        pairs = cell["B"] * cell["H"] * cell["Lq"] * cell["Lk"]
        most = PAIRS_OF_FEW if few else PAIRS_CHECKED
        if pairs <= most or cell.option in self.JOINT:
            return [()]
        heads = [()] if cell.weights == "average" else [(h,) for h in range(cell["Hkv"])]
        units = [(b, *h) for b in range(cell["B"]) for h in heads]
        count = max(1, most * len(units) // pairs)
        return sorted(random.Random(seed).sample(units, count))

    def part(self, cell: Cell, name: str, x: Tensor, where: tuple[int, ...]) -> Tensor:
        """Slices the batch and the heads, except for broadcast dimensions."""
        if not where:
            return x
        if name == "attn_mask":
            x = x[(None,) * (4 - x.dim())]
        b = where[0] if x.shape[0] > 1 else 0
        x = x[b : b + 1]
        if len(where) == 1 or x.dim() < 4 or x.shape[1] == 1:
            return x
        group = x.shape[1] // cell["Hkv"]
        return x[:, where[1] * group : (where[1] + 1) * group]

    def coverage(self, cell: Cell, parts: list[tuple[int, ...]]) -> str:
        if parts == [()]:
            return "all"
        if len(parts[0]) == 1:
            return f"{len(parts)} of {cell['B']} sequences"
        return f"{len(parts)} of {cell['B'] * cell['Hkv']} (sequence, head)"


def attend(
    query: Tensor,  # [B, H, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    mask: Tensor | None = None,  # broadcastable to [B, H, Lq, Lk]: True takes part, or added
    slopes: Tensor | None = None,  # [B|1, H]
    *,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The definition of attention: the output, and the weights [B, H, Lq, Lk].

    `options` are those of `AttentionOptions`, `given` the other tensors of the definition.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    record = AttentionOptions(scale=query.shape[-1] ** -0.5, **options)
    out, _, weights = defined_attention(
        query, key, value, mask, slopes, None, record, **given or {}
    )
    return out.to(query.dtype), weights.to(query.dtype)


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


def visible_to_last(cell: Cell, queries: int, length: int, device: torch.device) -> Tensor | None:
    """The visible pairs of the last queries of a sequence, [queries, length]; None: all."""
    if cell.mask == "none":
        return None
    seen = (keys_of(cell, at, length) for at in range(length - queries, length))
    low, high = torch.tensor([(keys.start, keys.stop) for keys in seen]).T[..., None]
    keys = torch.arange(length)
    return ((low <= keys) & (keys < high)).to(device)


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
