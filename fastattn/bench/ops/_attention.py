"""Masks and plain attention, shared by the operators."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fastattn.bench.cells import DOCUMENTS, Cell, keys_of
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs

PAIRS_CHECKED = 1 << 26
PAIRS_OF_FEW = 1 << 22


class SampledHeads(Operator):
    """An attention with the sizes B, H, Hkv, Lq and Lk; the check of a long one takes a sample."""

    JOINT: ClassVar[Sequence[str]] = ()  # options with an input of all heads: they are not sampled

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
            x = x.expand((*[1] * (4 - x.dim()), *x.shape)) if x.dim() < 4 else x
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


def document_ids(length: int) -> Tensor:
    """The document of each row, [length]."""
    return torch.arange(length) * DOCUMENTS // max(length, 1)


def distances(queries: int, keys: int, device: torch.device, offset: int = 0) -> Tensor:
    """Query position minus key position, [queries, keys]; query 0 is at position `offset`."""
    rows, columns = (torch.arange(n, device=device) for n in (queries, keys))
    return rows[:, None] + offset - columns


def table_biases(table: Tensor, distances: Tensor) -> Tensor:
    """The bias of all pairs [H, queries, keys], from a table of distances [H, 2 M + 1]."""
    return embedding(distances + table.shape[1] // 2, table.mT).permute(2, 0, 1)


def t5_biases(table: Tensor, distances: Tensor) -> Tensor:
    """The same from the buckets [32, H] of a decoder of T5 (https://arxiv.org/abs/1910.10683).

    A distance below 16 has its own bucket; up to 128 the others grow by a constant factor.
    """
    distances = distances.clamp(min=0)
    shared = 16 + (16 * (distances.clamp(min=16) / 16).log() / math.log(128 / 16)).long()
    buckets = torch.where(distances < 16, distances, shared.clamp(max=31))
    return embedding(buckets, table).permute(2, 0, 1)


def softmax_of(
    scores: Tensor,  # [..., Lq, Lk]
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The weights, with `bias` added to the scores and invisible keys excluded."""
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def attend(
    query: Tensor,  # [B, H, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    visible: Tensor | None = None,  # broadcastable to [B, H, Lq, Lk]
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and the weights [B, H, Lq, Lk]."""
    heads, rows = key.shape[-3], query.shape[-2]

    def of_keys(x: Tensor) -> Tensor:  # [B, H, Lq, n] as [B, Hkv, H / Hkv Lq, n]
        return x.unflatten(-3, (heads, -1)).flatten(-3, -2)

    def of_queries(x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, rows)).flatten(-4, -3)

    scores = of_queries(of_keys(query) @ key.mT) * query.shape[-1] ** -0.5
    weights = softmax_of(scores, visible, bias)
    return of_queries(of_keys(weights) @ value), weights


def with_weights(cell: Cell, out: Tensor, weights: Tensor) -> Outputs:
    """`out`, and the weights [B, H, Lq, Lk] in the form that the cell returns."""
    if cell.weights == "none":
        return (out,)
    return out, weights.mean(1) if cell.weights == "average" else weights


def split_mask(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """`attn_mask` as (visible, bias), one of which is None; True in visible takes part."""
    mask = inputs.get("attn_mask")
    return (mask, None) if mask is not None and mask.dtype == torch.bool else (None, mask)
