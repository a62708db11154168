"""Relative position biases: what ``relative_bias`` of attention takes besides a table of distances.

Each is a small learned table and how to read it, or, for :class:`Disentangled`, two, whose rows are
multiplied by queries and keys. Kernels read the tables: no bias of all pairs [Hq, Lq, Lk] is ever
stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["T5", "Decomposed2d", "Disentangled", "Window2d"]


class T5(NamedTuple):
    """The bias of T5: distances share the rows of a table by buckets of growing size.

    With d = i + offset - j, as for ``alibi_slopes``: if ``bidirectional``, half of the buckets are
    for the past (d >= 0) and half for the future; else all are for the past, and d < 0 is in the
    bucket of 0. The first half of the buckets of one side hold one distance each. The sizes of
    the others grow logarithmically up to ``max_distance``; the last one also holds all larger
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


class Disentangled(NamedTuple):
    r"""Terms of the scores that depend on the distance and on the content of a pair.

    For query i and key j, with d = i + offset - j as for ``alibi_slopes``:

    .. math:: s_{ij} = scale \cdot ((q_i + u) \cdot k_j + (q_i + v) \cdot R_{b(d)}
              + P_{b(-d)} \cdot k_j)

    in place of :math:`scale \cdot q_i \cdot k_j`; terms of absent tensors are 0. The tables have
    2 K + 1 rows. Without ``max_distance``, each distance has its own row, up to K: b(d) = d + K,
    clipped to the table. With it, distances up to K / 2 do; rows of greater distances hold
    logarithmically more, and ``max_distance - 1`` is in row K - 1 of a side:
    ``ceil(log(|d| / m) / log((max_distance - 1) / m) * (m - 1)) + m``, with m = K // 2.

    DeBERTa has R and P (disentangled attention, He et al. 2021, https://arxiv.org/abs/2006.03654;
    the logarithmic map is that of https://arxiv.org/abs/2111.09543). Transformer-XL has R, u and v
    (Dai et al. 2019, https://arxiv.org/abs/1901.02860), and so have Conformers. Shaw et al. 2018,
    https://arxiv.org/abs/1803.02155, have R.
    """

    query_table: Tensor | None = None  # R [2 K + 1, Hq|Hkv, D], of query's dtype or float32
    key_table: Tensor | None = None  # P, as R
    content_bias: Tensor | None = None  # u [Hq, D], of query's dtype or float32
    position_bias: Tensor | None = None  # v [Hq, D]; only with R
    max_distance: int | None = None


class Decomposed2d(NamedTuple):
    """The bias of SAM and MViTv2: for each query a number of each row and column of the keys.

    The keys are the tokens of an h x w image, row by row. The bias of query i and the key at (y, x)
    is ``rows[i, y] + columns[i, x]``. Both may depend on the query, see :meth:`of_tables`. Li et
    al. 2022, https://arxiv.org/abs/2112.01526; Kirillov et al. 2023, https://arxiv.org/abs/2304.02643
    """

    rows: Tensor  # [B, Hq, Lq, h], float32 or of query's dtype
    columns: Tensor  # [B, Hq, Lq, w]

    @staticmethod
    def of_tables(query: Tensor, of_rows: Tensor, of_columns: Tensor) -> Decomposed2d:
        """The products of the queries of an h x w image with the vectors of their distances.

        ``rows[i, y'] = query[i] . of_rows[y - y' + h - 1]`` for query i at (y, x), and the same of
        columns. query: [B, Hq, h w, D], of_rows: [2 h - 1, D], of_columns: [2 w - 1, D].
        """
        height, width = (table.shape[0] // 2 + 1 for table in (of_rows, of_columns))
        odd = of_rows.shape[0] % 2 and of_columns.shape[0] % 2
        if height * width != query.shape[2] or not odd:
            raise ValueError(
                "Decomposed2d.of_tables: of_rows and of_columns must have 2 h - 1 and 2 w - 1 rows "
                f"for {query.shape[2]} queries of an h x w image, got {of_rows.shape[0]} and "
                f"{of_columns.shape[0]}"
            )
        image = query.unflatten(2, (height, width))  # [B, Hq, h, w, D]
        # The vectors of two rows by their distance [h, h, D], and of two columns [w, w, D].
        row_vectors, column_vectors = (_vectors_of_pairs(table) for table in (of_rows, of_columns))
        rows = image @ row_vectors.mT
        columns = (image.transpose(2, 3) @ column_vectors.mT).transpose(2, 3)
        return Decomposed2d(rows.flatten(2, 3), columns.flatten(2, 3))


def _vectors_of_pairs(table: Tensor) -> Tensor:
    """[n, n, D] from [2 n - 1, D]: places i and j have the vector in row i - j + n - 1."""
    places = torch.arange(table.shape[0] // 2 + 1, device=table.device)
    return table[places[:, None] - places + table.shape[0] // 2]
