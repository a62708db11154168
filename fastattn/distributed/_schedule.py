"""Which parts of the keys of each rank the queries of each rank can see."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import masks
from fastattn.distributed._agree import gather
from fastattn.distributed._call import Call
from fastattn.distributed._pairs import VisiblePairs
from fastattn.distributed._peers import Peers
from fastattn.distributed.layout import Layout, Run


class Piece(NamedTuple):
    """A run of this rank's queries and a run of the keys of some rank."""

    query_run: int  # the index of the run of queries among this rank's
    queries: Run
    keys: Run

    @property
    def first_distance(self) -> int:
        """The least distance from a key to a query."""
        return self.queries.position - (self.keys.position + self.keys.length - 1)

    @property
    def last_distance(self) -> int:
        """The greatest distance from a key to a query."""
        return self.queries.position + self.queries.length - 1 - self.keys.position

    @property
    def columns(self) -> slice:
        """The positions of the keys."""
        return slice(self.keys.position, self.keys.position + self.keys.length)


class Schedule:
    """The visible pieces of this rank, and which ranks need the keys of which ranks.

    ``needs[q, k]`` is True if a query of rank q can see a key of rank k. All ranks have the same
    table, so sender and receiver skip the same messages.
    """

    def __init__(self, call: Call, peers: Peers) -> None:
        self.queries: tuple[Run, ...] = call.queries.runs[peers.rank]
        window = call.window
        self.needs = _needs(call.queries, call.keys, window)
        self.pieces = [_pieces(self.queries, keys, window) for keys in call.keys.runs]
        if call.mask is None:
            return
        # Each rank reads the mask for its own queries, and tells all others whose keys it needs.
        self.pieces = [
            tuple(piece for piece in pieces if _is_visible(call, piece)) for pieces in self.pieces
        ]
        row = torch.tensor([bool(pieces) for pieces in self.pieces], device=call.query.device)
        self.needs = torch.stack(gather(peers, row, [peers.size] * peers.size)).cpu()

    @property
    def reach(self) -> list[int]:
        """The steps that each rank's keys travel in the ring, to the last rank that needs them."""
        order = torch.arange(len(self.needs))
        steps = (order[:, None] - order) % len(order)  # from rank k to rank q
        return (self.needs * steps).amax(0).tolist()


def _is_visible(call: Call, piece: Piece) -> bool:
    """Whether the mask makes some pair of a piece visible."""
    assert call.mask is not None
    part = call.mask_part(piece.queries, piece.keys.position, piece.keys.length)
    return masks.part_is_visible(call.mask, part)


@functools.lru_cache(maxsize=64)
def _needs(queries: Layout, keys: Layout, window: tuple[int, int]) -> Tensor:
    """Which rank needs whose keys, by the window alone, bool [ranks of queries, ranks of keys]."""
    visible = VisiblePairs(keys, window)
    return torch.stack([visible.count(runs) > 0 for runs in queries.runs])


def _pieces(
    queries: tuple[Run, ...], keys: tuple[Run, ...], window: tuple[int, int]
) -> tuple[Piece, ...]:
    """The pieces with at least one pair in the window."""
    return tuple(
        Piece(index, run, keys_run)
        for index, run in enumerate(queries)
        for keys_run in keys
        if _sees_any_key(run, keys_run, window)
    )


def _sees_any_key(queries: Run, keys: Run, window: tuple[int, int]) -> bool:
    """Whether a query can see a key: one at position i a key from i - left to i + right."""
    left, right = window
    last_query = queries.position + queries.length - 1
    last_key = keys.position + keys.length - 1
    before = left >= 0 and last_key < queries.position - left
    after = right >= 0 and keys.position > last_query + right
    return not before and not after
