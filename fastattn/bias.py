"""Relative position biases: what ``relative_bias`` of attention takes besides a table of distances.

Each is a small learned table and how to read it. Kernels read the table itself: no bias of all
pairs [Hq, Lq, Lk] is ever stored.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["T5", "Window2d"]


class T5(NamedTuple):
    """The bias of T5: distances share the rows of a table by buckets of growing size.

    With d = i + offset - j, as for ``alibi_slopes``: half of the buckets are for the past
    (d >= 0), half for the future if ``bidirectional``; else all are for the past, and d < 0 is in
    the bucket of 0. Of the buckets of one side, the first half have one distance each. The sizes of
    the others grow logarithmically up to ``max_distance``; the last one also has all larger
    distances. Raffel et al. 2020, https://arxiv.org/abs/1910.10683
    """

    table: Tensor  # [num_buckets, Hq]: the weight of an nn.Embedding(num_buckets, Hq)
    bidirectional: bool = True
    max_distance: int = 128


class Window2d(NamedTuple):
    """The bias of Swin: a row of a table for each distance of two tokens of an h x w window.

    Token n is at (n // w, n % w). The row of a query at (y, x) and a key at (y', x') is
    ``(y - y' + h - 1) * (2 * w - 1) + x - x' + w - 1``. Liu et al. 2021,
    https://arxiv.org/abs/2103.14030
    """

    table: Tensor  # [(2 h - 1) (2 w - 1), Hq]
    window: tuple[int, int]  # (h, w)
