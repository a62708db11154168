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
    """The tensors of the primitive, in its order; packed sequences have the first four."""

    position_query: Tensor | None  # as query
    query_table: Tensor | None  # [1, Hq, buckets, D]
    key_table: Tensor | None
    distance_buckets: Tensor | None  # [2 M + 1] int32
    row_bias: Tensor | None = None  # [B, Hq, Lq, h]
    column_bias: Tensor | None = None  # [B, Hq, Lq, w]


NO_TERMS = Terms(None, None, None, None)


def fold_terms(
    op: str, bias: Disentangled, query: Tensor, key: Tensor, most: Any
) -> tuple[Tensor, Terms]:
    """Return query + u, and the other operands, for distances up to ``most``.

    Heads are the second dimension, also of packed sequences. Autograd gives the gradients of u and
    v.
    """
    heads = query.shape[1]
    of_queries, of_keys = (
        _table(op, name, getattr(bias, name), query, key.shape[1])
        for name in ("query_table", "key_table")
    )
    sizes = [table.shape[2] for table in (of_queries, of_keys) if table is not None]
    if not sizes or sizes[0] != sizes[-1]:
        given = f"got {sizes[0]} and {sizes[1]}" if sizes else "without a table"
        raise RuntimeError(
            f"{op}: relative_bias needs query_table or key_table, of as many rows, {given}"
        )
    u, v = (
        _added(op, name, getattr(bias, name), query, heads)
        for name in ("content_bias", "position_bias")
    )
    if v is not None and of_queries is None:
        raise RuntimeError(f"{op}: position_bias of relative_bias needs query_table")
    farthest = sizes[0] // 2
    limit = bias.max_distance
    if limit is not None:
        if not isinstance(limit, int) or limit <= farthest // 2 + 1 or farthest < 2:
            raise ValueError(
                f"{op}: max_distance of relative_bias must be None or an int above "
                f"{farthest // 2 + 1}, with tables of at least 5 rows, got {limit!r} and "
                f"{2 * farthest + 1} rows"
            )
        checks.check_int64(f"{op}: max_distance of relative_bias", limit)
    rows: Tensor | None = query if v is None else query + v
    rows = None if of_queries is None else rows
    of = _buckets_kept if query.is_cpu and runs_eagerly(query) else _buckets
    terms = Terms(rows, of_queries, of_keys, of(most, farthest, limit, query.device))
    return query if u is None else query + u, terms


def fold_image(op: str, bias: Decomposed2d, query: Tensor, k_len: int) -> Terms:
    """The operands of the bias of an image."""
    rows, columns = (
        checks.wide(op, f"{name} of relative_bias", x, query, wrong_dtype=RuntimeError)
        for name, x in zip(("rows", "columns"), bias, strict=True)
    )
    for name, x in (("rows", rows), ("columns", columns)):
        if x.dim() != 4 or x.shape[:3] != query.shape[:3]:
            expected = ", ".join(map(str, query.shape[:3]))
            raise _wrong_shape(op, name, f"({expected}, n)", x)
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


def _buckets(most: Any, farthest: int, max_distance: int | None, device: torch.device) -> Tensor:
    """[2 ``most`` + 1], of the distances up to ``most``."""
    distances = torch.arange(-most, most + 1, device=device)
    return distance_buckets(distances, farthest, max_distance)


@functools.lru_cache(maxsize=8)  # a logarithmic map takes longer than a small kernel
def _buckets_kept(*of: Any) -> Tensor:
    with torch.inference_mode(False):  # a later call may save it for its backward
        return _buckets(*of)


def _table(op: str, name: str, table: Any, query: Tensor, kv_heads: int) -> Tensor | None:
    """[2 K + 1, Hq|Hkv, D] as [1, Hq, 2 K + 1, D], in query's dtype."""
    if table is None:
        return None
    table = _checked(op, name, table, query)
    heads, width, shape = query.shape[1], query.shape[-1], table.shape
    fits = len(shape) == 3 and shape[0] % 2 == 1 and shape[1] in (heads, kv_heads)
    if not fits or shape[2] != width:
        raise _wrong_shape(op, name, f"(n, {heads} or {kv_heads}, {width}), with n odd", table)
    if shape[1] != heads:
        table = table.repeat_interleave(heads // kv_heads, 1)
    return table.transpose(0, 1)[None]


def _added(op: str, name: str, bias: Any, query: Tensor, heads: int) -> Tensor | None:
    """[Hq, D] as [Hq, 1, D], or as it is for packed rows [T, Hq, D], in query's dtype."""
    if bias is None:
        return None
    bias = _checked(op, name, bias, query)
    if tuple(bias.shape) != (heads, query.shape[-1]):
        raise _wrong_shape(op, name, f"({heads}, {query.shape[-1]})", bias)
    return bias[:, None] if query.dim() == 4 else bias


def _checked(op: str, name: str, x: Any, query: Tensor) -> Tensor:
    wide = checks.wide(op, f"{name} of relative_bias", x, query, wrong_dtype=RuntimeError)
    return wide.to(query.dtype)


def _wrong_shape(op: str, name: str, expected: str, x: Tensor) -> Exception:
    return RuntimeError(
        f"{op}: {name} of relative_bias must have shape {expected}, got {tuple(x.shape)}"
    )
