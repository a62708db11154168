"""Where the rows of packed sequences belong."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["places"]


def places(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of every row (B after the last sequence), its index there, and the lengths.

    ``starts`` is [B + 1]. The lengths have one extra entry, for the rows that belong to no
    sequence.
    """
    row = torch.arange(rows, device=starts.device)
    # Sequence b ends where b + 1 starts; empty sequences share a start and are skipped.
    ends = torch.zeros(rows + 1, dtype=torch.int64, device=starts.device)
    sequence = ends.index_add(0, starts[1:], torch.ones_like(starts[1:])).cumsum(0)[:rows]
    lengths = torch.nn.functional.pad(starts.diff(), (0, 1))
    return sequence, row - starts[sequence], lengths
