"""The sequences of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor


def locate_rows(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence of every row [rows], the row's index in it [rows], and lengths [B + 1].

    Sequence b begins at row ``starts[b]``. Rows after the last sequence have the sequence B, of
    length 0.
    """
    row = torch.arange(rows, device=starts.device)
    # Sequence b ends where b + 1 starts; empty sequences share a start and are skipped. Starts are
    # not checked on a GPU, so the scatter must not write out of bounds.
    ends = torch.zeros(rows + 1, dtype=torch.int64, device=starts.device)
    next_starts = starts[1:].clamp(0, rows)
    sequence = ends.index_add(0, next_starts, torch.ones_like(next_starts)).cumsum(0)[:rows]
    lengths = torch.nn.functional.pad(starts.diff(), (0, 1))
    return sequence, row - starts[sequence], lengths
