"""Which positions of a sequence each rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.checks import wrong_type


class Run(NamedTuple):
    """Consecutive rows of a rank that hold consecutive positions."""

    row: int  # the first row
    position: int  # its position
    length: int

    @property
    def rows(self) -> slice:
        """The rows of the rank, as a slice."""
        return slice(self.row, self.row + self.length)


@dataclass(frozen=True)
class Layout:
    """The positions of every rank's rows; every position from 0 on is held once.

    >>> from fastattn.distributed import Layout
    >>> layout = Layout.zigzag([4, 4])
    >>> layout.positions(0), layout.positions(1)
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """

    runs: tuple[tuple[Run, ...], ...]  # for each rank, in the order of its rows

    @staticmethod
    def contiguous(lengths: Sequence[int]) -> Layout:
        """Give each rank r in turn the next ``lengths[r]`` positions; a length may be 0."""
        starts = itertools.accumulate(_check_lengths(lengths), initial=0)
        return Layout(tuple(_make_runs([span]) for span in zip(starts, lengths, strict=False)))

    @staticmethod
    def zigzag(lengths: Sequence[int]) -> Layout:
        """Give rank r of n chunks r and 2 n - 1 - r of 2 n chunks; a length may be 0 or odd.

        With a causal mask, all ranks of equal lengths then have equal work. The first chunk of an
        odd length is the longer one.
        """
        halves = [(-(-length // 2), length // 2) for length in _check_lengths(lengths)]
        chunks = [first for first, _ in halves] + [last for _, last in reversed(halves)]
        starts = list(itertools.accumulate(chunks, initial=0))
        last = len(chunks) - 1
        return Layout(
            tuple(
                _make_runs((starts[chunk], chunks[chunk]) for chunk in (rank, last - rank))
                for rank in range(len(lengths))
            )
        )

    @staticmethod
    def of_positions(positions: Sequence[Tensor]) -> Layout:
        """Make a layout from the positions of each rank's rows, 1-D integer tensors.

        Attention is computed run by run, so a layout of few long runs is fast.
        """
        layout = Layout(tuple(_make_runs(_consecutive_spans(x)) for x in positions))
        spans = sorted((run.position, run.length) for runs in layout.runs for run in runs)
        ends = itertools.accumulate((length for _, length in spans), initial=0)
        for (position, _), end in zip(spans, ends, strict=False):
            if position != end:
                defect = "missing" if position > end else "held twice"
                wrong_position = end if position > end else position
                raise ValueError(
                    f"Layout: the ranks must hold every position from 0 on once, "
                    f"position {wrong_position} is {defect}"
                )
        return layout

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    @property
    def total(self) -> int:
        """The length of the whole sequence."""
        return sum(self.lengths)

    def positions(self, rank: int) -> Tensor:
        """The positions of the rows of a rank, int64 [L_rank]: ``x[:, :, positions]`` shards x."""
        spans = [torch.arange(run.position, run.position + run.length) for run in self.runs[rank]]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _check_lengths(lengths: Any) -> Sequence[int]:
    """Return the lengths, or raise an error unless they are non-negative integers."""
    if not isinstance(lengths, Sequence) or not all(type(n) is int for n in lengths):
        raise wrong_type("Layout", "lengths", lengths, "a sequence of ints")
    if any(n < 0 for n in lengths):
        raise ValueError(f"Layout: lengths must not be negative, got {list(lengths)}")
    return lengths


def _make_runs(spans: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Make the runs of a rank from spans (position, length) in the order of its rows."""
    runs: list[Run] = []
    row = 0
    for position, length in spans:
        if not length:
            continue
        previous = runs[-1] if runs else None
        if previous is not None and previous.position + previous.length == position:
            runs[-1] = previous._replace(length=previous.length + length)
        else:
            runs.append(Run(row, position, length))
        row += length
    return tuple(runs)


def _consecutive_spans(positions: Any) -> list[tuple[int, int]]:
    """Split positions into spans (position, length) of consecutive positions."""
    if not isinstance(positions, Tensor):
        raise wrong_type("Layout", "positions", positions, "Tensor")
    if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"Layout: positions must be 1-D and int32 or int64, got {positions.dtype} of shape "
            f"{tuple(positions.shape)}"
        )
    x = positions.to("cpu", torch.int64)
    if not x.numel():
        return []
    breaks = (x.diff() != 1).nonzero().flatten().add(1)
    edges = [0, *breaks.tolist(), x.numel()]
    return [(int(x[a]), b - a) for a, b in itertools.pairwise(edges)]
