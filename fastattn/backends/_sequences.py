"""The sequences of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor


def places(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of every row (B after the last sequence), its index there, and the lengths.

    ``starts`` is [B + 1]. The lengths have one extra entry, for the rows that belong to no
    sequence.
    """
    row = torch.arange(rows, device=starts.device)
    # Sequence b ends where b + 1 starts; empty sequences share a start and are skipped. Starts are
    # not checked on a GPU, so the scatter must not write out of bounds.
    ends = torch.zeros(rows + 1, dtype=torch.int64, device=starts.device)
    next_starts = starts[1:].clamp(0, rows)
    sequence = ends.index_add(0, next_starts, torch.ones_like(next_starts)).cumsum(0)[:rows]
    lengths = torch.nn.functional.pad(starts.diff(), (0, 1))
    return sequence, row - starts[sequence], lengths
