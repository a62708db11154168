"""Validates a relative position bias, and lays it out as the primitive's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat
from fastattn.bias import T5, Decomposed2d, Disentangled, Window2d
from fastattn.ops._disentangled import NO_TERMS, fold_image, fold_terms


def fold_bias(
    op: str, bias: Any, query: Tensor, key: Tensor, offset: int
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the query, with a content bias added, and the operands of the bias: a table of
    distances, positions, and the tensors of ``_disentangled.Terms``."""
    if type(bias) is Disentangled:
        largest_distance = traced_max(query.shape[2] - 1 + offset, key.shape[2] - 1 - offset, 0)
        query, terms = fold_terms(op, bias, query, key, largest_distance)
        return query, (None, None, *terms)
    if type(bias) is Decomposed2d:
        return query, (None, None, *fold_image(op, bias, query, key.shape[2]))
    return query, (*_fold_positions(op, bias, query, key.shape[2], offset), *NO_TERMS)


def _fold_positions(
    op: str, bias: Any, query: Tensor, k_len: int, offset: int
) -> tuple[Tensor, Tensor | None]:
    """Return the table [1, Hq, 2 M + 1], whose middle is distance 0, and positions [Lk] or None.

    The table is float32 (float64 for float64), the positions are int32; None is 0, 1, 2, ...
    """
    if isinstance(bias, Window2d):
        table, positions = _fold_window_2d(op, bias, query, k_len, offset)
        return table[None], positions
    if not isinstance(bias, (Tensor, T5)):
        raise checks.wrong_type(
            op, "relative_bias", bias, "Tensor, T5, Decomposed2d, Disentangled or Window2d"
        )
    # The maximum of |i + offset - j| over all pairs.
    largest_distance = traced_max(query.shape[2] - 1 + offset, k_len - 1 - offset, 0)
    lengths = "{} queries and {} keys with offset {}", query.shape[2], k_len, offset
    return fold_distances(op, bias, query, largest_distance, lengths), None


def split_bias(bias: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a relative bias for the signature of a call: its tensors, then its kind and options."""
    bias_type = type(bias)
    if bias_type in (T5, Window2d):
        return (bias.table,), (bias_type.__name__, *bias[1:])
    if bias_type in (Disentangled, Decomposed2d):
        return bias[:4], (bias_type.__name__, *bias[4:])
    return (bias,), ("table",)


def traced_max(*sizes: Any) -> Any:
    """Return the maximum; as a tensor under torch.jit.trace, so the graph depends on all sizes."""
    if compat.records_trace():
        return torch.stack([torch.as_tensor(size) for size in sizes]).amax()
    return max(sizes)


def fold_distances(
    op: str, bias: Any, query: Tensor, largest_distance: int, lengths: tuple[Any, ...] | None = None
) -> Tensor:
    """Return the table [1, Hq, 2 M + 1] of a bias that depends only on distances.

    The table must have all distances up to ``largest_distance``. ``lengths`` describes the queries
    and keys in an error: a format string and its numbers, which a compiler would treat as constants
    if they were formatted before. Without ``lengths``, ``largest_distance`` is only a bound, and
    the kernel checks that the table has the distances that it needs.
    """
    if isinstance(bias, T5):
        return _fold_t5(op, bias, query, largest_distance)[None]
    if not isinstance(bias, Tensor):
        raise checks.wrong_type(
            op,
            "relative_bias",
            bias,
            "Tensor or T5 (Window2d needs equal lengths), or Disentangled for packed sequences",
        )
    table = checks.wide(op, "relative_bias", bias, query, wrong_dtype=RuntimeError)
    heads, least_width = query.shape[1], 1 if lengths is None else 2 * largest_distance + 1
    shape = tuple(table.shape)
    if len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0 or shape[1] < least_width:
        requirement = ""
        if lengths is not None:
            requirement = f" and at least {least_width} for " + lengths[0].format(*lengths[1:])
        raise RuntimeError(
            f"{op}: relative_bias must have shape ({heads}, n), a row for each query head, with n "
            f"odd{requirement}, got {shape}"
        )
    return table[None]


def _fold_t5(op: str, bias: T5, query: Tensor, largest_distance: int) -> Tensor:
    """Return the bias [Hq, 2 M + 1] of the distances -M, ..., M, where M is the largest one."""
    table, bidirectional, max_distance = bias
    name = "the table of relative_bias"
    table = checks.wide(op, name, table, query, wrong_dtype=RuntimeError)
    heads = query.shape[1]
    if table.dim() != 2 or table.shape[1] != heads:
        raise RuntimeError(
            f"{op}: {name} must have shape (num_buckets, {heads}), a column for each query head, "
            f"got {tuple(table.shape)}"
        )
    checks.check_flag(op, "bidirectional of relative_bias", bidirectional)
    sides = 2 if bidirectional else 1
    if table.shape[0] < 2 * sides:
        raise RuntimeError(
            f"{op}: {name} must have at least {2 * sides} buckets if bidirectional is "
            f"{bidirectional}, got {table.shape[0]}"
        )
    single = table.shape[0] // sides // 2  # buckets of one distance each, on one side
    if not isinstance(max_distance, int) or max_distance <= single:
        raise ValueError(
            f"{op}: max_distance of relative_bias must be an int above {single}, the distances "
            f"with buckets of their own, got {max_distance!r}"
        )
    checks.check_int64(f"{op}: max_distance of relative_bias", max_distance)
    distances = torch.arange(-largest_distance, largest_distance + 1, device=table.device)
    return table.mT.index_select(
        1, t5_buckets(distances, table.shape[0], bidirectional, max_distance)
    )


def t5_buckets(
    distances: Tensor, num_buckets: int, bidirectional: bool, max_distance: int
) -> Tensor:
    """Return the bucket of each distance query - key, see :class:`fastattn.bias.T5`."""
    if bidirectional:
        num_buckets //= 2
        first_bucket = num_buckets * (distances < 0)
        steps = distances.abs()
    else:
        first_bucket = torch.zeros_like(distances)
        steps = distances.clamp(min=0)
    # The bucket of n >= single is single plus the part log(n / single) / log(max_distance / single)
    # of the other buckets, rounded down. In float32 and in this order, to round as T5's own code.
    single = num_buckets // 2
    ratio = torch.log(steps.clamp(min=single).float() / single) / math.log(max_distance / single)
    shared = (single + (ratio * (num_buckets - single)).long()).clamp(max=num_buckets - 1)
    return first_bucket + torch.where(steps < single, steps, shared)


def _fold_window_2d(
    op: str, bias: Window2d, query: Tensor, k_len: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the table as [Hq, rows], and positions y (2 w - 1) + x, whose distances are rows."""
    table, window = bias
    name = "the table of relative_bias"
    table = checks.wide(op, name, table, query, wrong_dtype=RuntimeError)
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in window):
        raise TypeError(
            f"{op}: window of relative_bias must be a pair of positive ints, got {window!r}"
        )
    height, width = window
    heads, q_len = query.shape[1:3]
    shape = ((2 * height - 1) * (2 * width - 1), heads)
    if tuple(table.shape) != shape:
        raise RuntimeError(
            f"{op}: {name} must have shape {shape} for a window of {height} x {width} and {heads} "
            f"query heads, got {tuple(table.shape)}"
        )
    if k_len != height * width or offset < 0 or q_len + offset > k_len:
        raise RuntimeError(
            f"{op}: with relative_bias of a window of {height} x {width}, key must have "
            f"{height * width} rows and query at most as many, got {k_len} and {q_len}"
        )
    rows = torch.arange(height, dtype=torch.int32, device=table.device) * (2 * width - 1)
    columns = torch.arange(width, dtype=torch.int32, device=table.device)
    # The view makes a graph of torch.jit.trace require the number of keys of the window.
    return table.mT, (rows[:, None] + columns).view(k_len)
