"""Appending to a cache, row by row; a rotation is a product of complex numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastattn.backends.primitives import AppendOptions
from naive._arrays import Array, array, tensor


def append_to_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_positions: Tensor | None = None,
    query: Tensor | None = None,
    *,
    options: AppendOptions,
) -> Tensor | None:
    """Write into the caches, in float64; return the rotated queries."""
    batch, _, rows, _ = key.shape
    page = key_cache.shape[2]
    new_keys, queries = array(key), None if query is None else array(query)
    for b in range(batch):
        for i in range(rows):
            at = int(cache_seqlens[b]) + i
            if rotary_cos is not None and rotary_sin is not None and queries is not None:
                position = at if rotary_positions is None else int(rotary_positions[b, i])
                turn = array(rotary_cos[position]) + 1j * array(rotary_sin[position])
                new_keys[b, :, i] = _turned(new_keys[b, :, i], turn, options)
                token = i - (rows - queries.shape[2])
                if token >= 0:
                    queries[b, :, token] = _turned(queries[b, :, token], turn, options)
            entry, row = b, at
            if block_table is not None:
                entry, row = int(block_table[b, at // page]), at % page
            elif cache_batch_idx is not None:
                entry = int(cache_batch_idx[b])
            key_cache[entry, :, row] = tensor(new_keys[b, :, i])
            value_cache[entry, :, row] = value[b, :, i]
    return None if queries is None else tensor(queries)


def _turned(x: Array, turn: NDArray[np.complexfloating[Any, Any]], options: AppendOptions) -> Array:
    """x [H, D], whose pairs of columns are the real and imaginary parts of complex numbers."""
    pairs = turn.shape[0]
    columns = np.arange(2 * pairs)
    real, imaginary = np.split(columns, 2)
    if options.rotary_interleaved:
        real, imaginary = columns[::2], columns[1::2]
    both = (x[:, real] + 1j * x[:, imaginary]) * turn
    result = x.copy()
    result[:, real], result[:, imaginary] = both.real, both.imag
    return result
