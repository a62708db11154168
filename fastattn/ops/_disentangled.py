"""Validates biases that depend on the query, and lays them out as the primitive's tensors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks
from fastattn.bias import Decomposed2d, Disentangled
from fastattn.compat import runs_eagerly


class Terms(NamedTuple):
    """The operands of attention for these biases, in order; packed sequences use the first four."""

    position_query: Tensor | None  # as query
    query_table: Tensor | None  # [1, Hq, buckets, D]
    key_table: Tensor | None
    distance_buckets: Tensor | None  # [2 M + 1] int32
    row_bias: Tensor | None = None  # [B, Hq, Lq, h]
    column_bias: Tensor | None = None  # [B, Hq, Lq, w]


NO_TERMS = Terms(None, None, None, None)


def fold_terms(
    op: str, bias: Disentangled, query: Tensor, key: Tensor, largest_distance: Any
) -> tuple[Tensor, Terms]:
    """Return query + u, and the operands of the bias, for distances up to ``largest_distance``.

    u and v are ``content_bias`` and ``position_bias``; autograd gives their gradients. Heads are
    the second dimension of query and key, also of packed sequences.
    """
    heads = query.shape[1]
    query_table, key_table = (
        _check_table(op, name, getattr(bias, name), query, key.shape[1])
        for name in ("query_table", "key_table")
    )
    sizes = [table.shape[2] for table in (query_table, key_table) if table is not None]
    if not sizes or sizes[0] != sizes[-1]:
        problem = f"got {sizes[0]} and {sizes[1]}" if sizes else "without a table"
        raise RuntimeError(
            f"{op}: relative_bias needs query_table or key_table, of as many rows, {problem}"
        )
    u, v = (
        _check_vector(op, name, getattr(bias, name), query, heads)
        for name in ("content_bias", "position_bias")
    )
    if v is not None and query_table is None:
        raise RuntimeError(f"{op}: position_bias of relative_bias needs query_table")
    reach = sizes[0] // 2
    limit = bias.max_distance
    if limit is not None:
        if not isinstance(limit, int) or limit <= reach // 2 + 1 or reach < 2:
            raise ValueError(
                f"{op}: max_distance of relative_bias must be None or an int above "
                f"{reach // 2 + 1}, with tables of at least 5 rows, got {limit!r} and "
                f"{2 * reach + 1} rows"
            )
        checks.check_int64(f"{op}: max_distance of relative_bias", limit)
    position_query: Tensor | None = query if v is None else query + v
    position_query = None if query_table is None else position_query
    buckets_of = _cached_buckets if query.is_cpu and runs_eagerly(query) else _make_buckets
    buckets = buckets_of(largest_distance, reach, limit, query.device)
    terms = Terms(position_query, query_table, key_table, buckets)
    return query if u is None else query + u, terms


def fold_image(op: str, bias: Decomposed2d, query: Tensor, k_len: int) -> Terms:
    """Check the bias of an image of h · w = ``k_len`` keys, and return its operands."""
    rows, columns = (
        checks.wide(op, f"{name} of relative_bias", x, query, wrong_dtype=RuntimeError)
        for name, x in zip(("rows", "columns"), bias, strict=True)
    )
    for name, x in (("rows", rows), ("columns", columns)):
        if x.dim() != 4 or x.shape[:3] != query.shape[:3]:
            expected = ", ".join(map(str, query.shape[:3]))
            raise _shape_error(op, name, f"({expected}, n)", x)
    if rows.shape[3] * columns.shape[3] != k_len:
        raise RuntimeError(
            f"{op}: rows and columns of relative_bias must be of {k_len} keys, got "
            f"{rows.shape[3]} x {columns.shape[3]}"
        )
    return Terms(None, None, None, None, rows, columns)


def distance_buckets(distances: Tensor, farthest: int, max_distance: int | None) -> Tensor:
    """The row of each distance in a table of 2 ``farthest`` + 1, see ``bias.Disentangled``."""
    if max_distance is not None:
        # In float32 and in this order, so that it rounds as in DeBERTa's own code.
        middle = farthest // 2
        steps = distances.abs().clamp(min=middle).float()
        ratio = torch.log(steps / middle) / torch.log(steps.new_tensor((max_distance - 1) / middle))
        shared = torch.ceil(ratio * (middle - 1)).long() + middle
        distances = torch.where(distances.abs() > middle, distances.sign() * shared, distances)
    return (distances.clamp(-farthest, farthest) + farthest).to(torch.int32)


def _make_buckets(
    largest_distance: Any, farthest: int, max_distance: int | None, device: torch.device
) -> Tensor:
    """Return the buckets of the distances -n to n, [2 n + 1], where n is the largest one."""
    distances = torch.arange(-largest_distance, largest_distance + 1, device=device)
    return distance_buckets(distances, farthest, max_distance)


@functools.lru_cache(maxsize=8)  # a logarithmic map takes longer than a small kernel
def _cached_buckets(*arguments: Any) -> Tensor:
    with torch.inference_mode(False):  # a later call may save it for its backward
        return _make_buckets(*arguments)


def _check_table(op: str, name: str, table: Any, query: Tensor, kv_heads: int) -> Tensor | None:
    """Check a table [2 K + 1, Hq|Hkv, D]; return [1, Hq, 2 K + 1, D] in query's dtype, or None."""
    if table is None:
        return None
    table = _cast_operand(op, name, table, query)
    heads, width, shape = query.shape[1], query.shape[-1], table.shape
    fits = len(shape) == 3 and shape[0] % 2 == 1 and shape[1] in (heads, kv_heads)
    if not fits or shape[2] != width:
        raise _shape_error(op, name, f"(n, {heads} or {kv_heads}, {width}), with n odd", table)
    if shape[1] != heads:
        table = table.repeat_interleave(heads // kv_heads, 1)
    return table.transpose(0, 1)[None]


def _check_vector(op: str, name: str, bias: Any, query: Tensor, heads: int) -> Tensor | None:
    """Check a bias [Hq, D]; return it in query's dtype, in a shape to add to query, or None."""
    if bias is None:
        return None
    bias = _cast_operand(op, name, bias, query)
    if tuple(bias.shape) != (heads, query.shape[-1]):
        raise _shape_error(op, name, f"({heads}, {query.shape[-1]})", bias)
    return bias[:, None] if query.dim() == 4 else bias  # packed rows are [T, Hq, D]


def _cast_operand(op: str, name: str, x: Any, query: Tensor) -> Tensor:
    operand = checks.wide(op, f"{name} of relative_bias", x, query, wrong_dtype=RuntimeError)
    return operand.to(query.dtype)


def _shape_error(op: str, name: str, expected: str, x: Tensor) -> Exception:
    return RuntimeError(
        f"{op}: {name} of relative_bias must have shape {expected}, got {tuple(x.shape)}"
    )
