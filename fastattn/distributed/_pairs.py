"""The visible pairs of the queries of one rank and the keys of every rank, counted by position."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn._flops import visible_pairs
from fastattn.distributed.layout import Layout, Run


class VisiblePairs:
    """Counts the pairs that a window makes visible, of any queries and the keys of a layout.

    Runs of keys, in the order of positions, leave no gap. So the runs that a run of queries sees
    completely are consecutive, and only the few at both edges of the window are counted one by one.
    """

    def __init__(self, keys: Layout, window: tuple[int, int]) -> None:
        runs = sorted(
            (run.position, run.length, rank) for rank, runs in enumerate(keys.runs) for run in runs
        )
        self.ranks, self.total, self.window = keys.ranks, keys.total, window
        self.starts = [position for position, _, _ in runs]
        self.ends = [position + length for position, length, _ in runs]
        self.owners = [rank for _, _, rank in runs]
        self.lengths = [length for _, length, _ in runs]
        self._owner_ids, self._run_lengths = torch.tensor(
            [self.owners, self.lengths], dtype=torch.int64
        )

    def count(self, queries: Sequence[Run]) -> Tensor:
        """The number of visible pairs with the keys of each rank, int64 [ranks]."""
        counts = torch.zeros(self.ranks, dtype=torch.int64)
        owners, pairs = [], []  # of the runs at the edges of the window
        for run in queries:
            begin, from_all, to_all, end = self._edges(run)
            inside = slice(from_all, to_all)
            owner_ids, lengths = self._owner_ids[inside], self._run_lengths[inside]
            counts.index_add_(0, owner_ids, lengths, alpha=run.length)
            for n in (*range(begin, from_all), *range(to_all, end)):
                owners.append(self.owners[n])
                pairs.append(self._count_pairs(run, n))
        return counts.index_add_(0, *torch.tensor([owners, pairs], dtype=torch.int64))

    def _edges(self, run: Run) -> tuple[int, int, int, int]:
        """Return begin, from_all, to_all, end: some query of a run sees a key of each of the runs
        [begin, end), and all of its queries see all keys of the runs [from_all, to_all)."""
        left, right = self.window
        first, last = run.position, run.position + run.length - 1
        first_seen_by_any, first_seen_by_all = (
            max(position - left, 0) if left >= 0 else 0 for position in (first, last)
        )
        last_seen_by_any, last_seen_by_all = (
            position + right if right >= 0 else self.total - 1 for position in (last, first)
        )
        begin, end = (
            bisect_right(self.ends, first_seen_by_any),
            bisect_right(self.starts, last_seen_by_any),
        )
        from_all = min(max(bisect_left(self.starts, first_seen_by_all), begin), end)
        to_all = max(min(bisect_right(self.ends, last_seen_by_all + 1), end), from_all)
        return begin, from_all, to_all, end

    def _count_pairs(self, run: Run, n: int) -> int:
        """The number of visible pairs of a run of queries and run n of the keys."""
        left, right = self.window
        distance = run.position - self.starts[n]
        return visible_pairs(run.length, self.lengths[n], distance, left, right)
