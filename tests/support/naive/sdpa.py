"""Scaled dot-product attention, with every option of the primitive."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fastattn.backends.primitives import AttentionOptions
from naive._arrays import array, dropout, masked, softmax, tensor, transposed
from naive._mask_program import visible_by_program


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    position_query: Tensor | None = None,
    query_table: Tensor | None = None,
    key_table: Tensor | None = None,
    distance_buckets: Tensor | None = None,
    row_bias: Tensor | None = None,
    column_bias: Tensor | None = None,
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, weights) in float64; arguments as for the primitive, all finite."""
    q, k, v = array(query), array(key), array(value)
    repeats = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    shape = (*q.shape[:3], k.shape[2])
    distance = np.arange(shape[2])[:, None] + options.offset - np.arange(shape[3])

    s = q @ transposed(k)
    for sign, rows, table in ((1, position_query, query_table), (-1, key, key_table)):
        if table is not None:
            own = array(rows).repeat(shape[1] // rows.shape[1], axis=1)
            bucket = distance_buckets.numpy()[distance_buckets.shape[0] // 2 + sign * distance]
            for i, j in np.ndindex(*bucket.shape):
                row = own[:, :, i if sign > 0 else j]
                s[:, :, i, j] += (row * array(table)[:, :, bucket[i, j]]).sum(-1)
    s = s * np.longdouble(options.scale)
    if options.softcap > 0:
        s = np.tanh(s / np.longdouble(options.softcap)) * np.longdouble(options.softcap)
    s, seen = masked(s, attn_mask)
    if relative_bias is not None:
        bias = array(relative_bias)[:, :, _indices(relative_bias, positions, shape, options)]
        s, seen = s + bias, seen & (bias != -np.inf)
    if row_bias is not None and column_bias is not None:
        keys = np.arange(shape[3])
        height, width = row_bias.shape[3], column_bias.shape[3]
        bias = array(row_bias)[..., keys // width] + array(column_bias)[..., keys % width]
        assert height * width == shape[3]
        s, seen = s + bias, seen & (bias != -np.inf)
    if options.window_left >= 0:
        seen &= distance <= options.window_left
    if options.window_right >= 0:
        seen &= distance >= -options.window_right
    if mask_program is not None:
        seen &= visible_by_program(mask_program, shape)
    if alibi_slopes is not None:
        s = s - array(alibi_slopes)[:, :, None, None] * np.abs(distance)
    sink = np.full((1, 1), -np.inf) if sinks is None else array(sinks)
    column = np.broadcast_to(sink[:, :, None, None], (*s.shape[:3], 1))
    p, lse = softmax(np.append(s, column, -1), np.append(seen, column != -np.inf, -1))
    first = options.first_query, options.first_key, options.first_head
    w = p[..., :-1] * dropout(shape, options.dropout_p, seed, first)
    wanted = {0: np.empty(0), 1: w, 2: w.sum(1) / max(w.shape[1], 1)}[options.weights]
    return tensor(w @ v), tensor(lse), tensor(wanted)


def _indices(
    table: Tensor, positions: Tensor | None, shape: tuple[int, ...], options: AttentionOptions
) -> Any:
    """The column of the table for each pair, [Lq, Lk]."""
    places = np.arange(options.offset, options.offset + shape[2])
    keys = np.arange(shape[3])
    if positions is not None:
        places, keys = positions.numpy()[places], positions.numpy()
    return table.shape[2] // 2 + places[:, None] - keys
