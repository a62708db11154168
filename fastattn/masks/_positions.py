"""Masks of positions, which are intervals of keys, and of documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._mask_program import Kind, Leaf
from fastattn.compat import is_unintercepted
from fastattn.masks._calls import (
    CacheCall,
    Call,
    DenseCall,
    check_device,
    check_int,
    check_rows,
    copy_as_int32,
    fix_sizes,
)
from fastattn.masks._mask import LeafMask, Mask


class _Interval(LeafMask):
    """Shows keys low[i] to high[i] to query i."""

    def __init__(
        self,
        name: str,
        bounds: Callable[..., tuple[Tensor, Tensor]],
        lengths: Tensor | None = None,
    ) -> None:
        super().__init__(name, False)
        self.bounds, self.lengths = bounds, lengths

    def _check(self, call: Call) -> None:
        if self.lengths is not None:
            check_rows(call, "lengths", self.lengths.shape[0], call.batch)
            check_device(call, "lengths", self.lengths)

    def _may_show(self, call: Call) -> bool:
        """Whether any query has a non-empty interval."""
        if self.negated:
            return True
        low, high = self._interval_ends(call).unbind(1)
        return bool((low < high).any())

    def _interval_ends(self, call: Call) -> Tensor:
        """Return every query's first visible key and the one after the last, [rows|1, 2, Lq]."""
        lengths = () if self.lengths is None else (call.expand_to_queries(self.lengths),)
        ends = self.bounds(call.positions(), call.whole_lengths()[1], *lengths)
        return call.to_local_keys(torch.stack(torch.broadcast_tensors(*ends), 1)).to(torch.int32)

    def _steps(self, call: Call) -> list[Kind | Leaf]:
        data = self._interval_ends(call)
        return [Leaf(Kind.INTERVAL, self.negated, call.padded(data), data.shape[0])]


def causal() -> Mask:
    """Show keys up to the query's own position.

    >>> import torch
    >>> from fastattn import masks, scaled_dot_product_attention
    >>> x = torch.eye(3)[None, None]
    >>> scaled_dot_product_attention(x, x, x, scale=0.0, mask=masks.causal())[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    return _Interval("causal()", _bounds_of_causal)


def _bounds_of_causal(positions: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of the keys from the first up to the query's own position."""
    return torch.zeros_like(positions), positions + 1


def sliding_window(left: int, right: int) -> Mask:
    """Show keys at most ``left`` positions before and ``right`` after the query; -1: all.

    >>> from fastattn import masks
    >>> masks.causal() & masks.sliding_window(128, 0)
    (causal() & sliding_window(128, 0))
    """
    for name, size in (("left", left), ("right", right)):
        check_int("sliding_window", name, size, -1)

    bounds = functools.partial(_bounds_of_window, left, right)
    return _Interval(f"sliding_window({left}, {right})", bounds)


def _bounds_of_window(
    left: int, right: int, positions: Tensor, k_len: int
) -> tuple[Tensor, Tensor]:
    """Return the bounds of the keys from ``left`` before to ``right`` after the query."""
    low = positions - left if left >= 0 else torch.zeros_like(positions)
    return low, positions + right + 1 if right >= 0 else torch.full_like(positions, k_len)


def chunked(size: int) -> Mask:
    """Show keys in the query's own chunk of ``size`` positions; usually with ``& causal()``."""
    check_int("chunked", "size", size, 1)

    return _Interval(f"chunked({size})", functools.partial(_bounds_of_chunks, size))


def _bounds_of_chunks(size: int, positions: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of the keys in the query's chunk."""
    low = positions.div(size, rounding_mode="floor") * size
    return low, low + size


def prefix_lm(lengths: int | Tensor) -> Mask:
    """Show the first ``lengths`` keys, the prefix, and all keys up to the query's own position.

    ``lengths`` is one number for all sequences, or a tensor [B] of int32 or int64.
    (https://arxiv.org/abs/1910.10683)
    """
    if not isinstance(lengths, Tensor):
        check_int("prefix_lm", "lengths", lengths, 0)
        bounds = functools.partial(_bounds_of_prefix, lengths=lengths)
        return _Interval(f"prefix_lm({lengths})", bounds)
    copied = copy_as_int32("prefix_lm", "lengths", lengths, "[B]", (1,))
    return _Interval(f"prefix_lm(<lengths {list(copied.shape)}>)", _bounds_of_prefix, copied)


def _bounds_of_prefix(
    positions: Tensor, k_len: int, lengths: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bounds of the keys in the prefix or up to the query's own position."""
    return torch.zeros_like(positions), (positions + 1).clamp(min=lengths)


# --- documents -----------------------------------------------------------------------------------


class _Documents(LeafMask):
    """Shows a key to a query with an equal id."""

    def __init__(self, ids: Tensor, key_ids: Tensor | None, name: str) -> None:
        super().__init__(name, False)
        self.ids, self.key_ids = ids, key_ids  # [B|1, Lq], [B|1, Lk] int32; None: the same

    def _check(self, call: Call) -> None:
        """Raise an error unless the ids have the lengths and the batch of the call."""
        q_len, k_len = call.whole_lengths()
        queries = ("ids of the queries", self.ids, q_len)
        keys = ("ids of the keys", self.ids if self.key_ids is None else self.key_ids, k_len)
        ids_are_positions = self.key_ids is None and isinstance(call, CacheCall)
        for subject, ids, length in (keys,) if ids_are_positions else (queries, keys):
            if ids.shape[1] != length:
                raise RuntimeError(
                    f"{call.op}: mask: the {subject} must have length {length}, got {ids.shape[1]}"
                )
            check_rows(call, f"the {subject}", ids.shape[0], call.rows)
            check_device(call, f"the {subject}", ids)

    def _may_show(self, call: Call) -> bool:
        """Whether a query and a key share an id, over the whole batch."""
        if self.negated:
            return True
        queries, keys = self._call_ids(call)  # of the whole batch, so this may overestimate
        return bool(torch.isin(queries, keys).any())

    def _call_ids(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the ids of the call's queries and keys, [rows|1, L]."""
        q_len, k_len = call.whole_lengths()
        if self.key_ids is None:
            ids = fix_sizes(self.ids, k_len)
            return call.select_ids(call.ids_of_queries(ids), ids)
        return call.select_ids(fix_sizes(self.ids, q_len), fix_sizes(self.key_ids, k_len))

    def _steps(self, call: Call) -> list[Kind | Leaf]:
        """Return intervals if the keys of each document are contiguous, else ids."""
        query_ids, key_ids = self._call_ids(call)
        ends = _document_ends(call, query_ids, key_ids)
        if ends is not None:
            return [Leaf(Kind.INTERVAL, self.negated, call.padded(ends), ends.shape[0])]
        queries, keys = call.padded(query_ids), call.padded(key_ids)
        rows = queries.shape[0] if keys.shape[0] == 1 else keys.shape[0]
        data = torch.cat([queries.expand(rows, -1), keys.expand(rows, -1)], 1)
        return [Leaf(Kind.IDS, self.negated, data, rows)]


def _document_ends(call: Call, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Return the first key of each query's document and the one after the last, [rows, 2, Lq].

    None if the keys of a document are not contiguous, or if their ids cannot be read.
    """
    if not isinstance(call, DenseCall) or not (queries.is_cpu and is_unintercepted()):
        return None
    if min(call.q_len, call.k_len) == 0:
        return None
    queries, keys = (x.expand(max(len(queries), len(keys)), -1) for x in (queries, keys))
    ids, places = keys.contiguous().sort(dim=1, stable=True)
    query_ids = queries.contiguous()
    begin, end = (
        torch.searchsorted(ids, query_ids, right=after_equal) for after_equal in (False, True)
    )
    low = places.gather(1, begin.clamp(max=call.k_len - 1))
    last = places.gather(1, (end - 1).clamp(min=0))
    counts = end - begin
    if bool(((last - low != counts - 1) & (counts > 0)).any()):
        return None
    return torch.stack((low, low + counts), 1).to(torch.int32)


def document(ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Show keys with the id of the query: packed documents, segments, groups.

    ``ids`` [L] or [B, L], int32 or int64, are the ids of queries and keys, or only of the queries
    if there are ``key_ids`` [Lk] or [B, Lk]. They need not be sorted, but blocks are skipped only
    where they are nearly sorted. They must fit int32, which is checked in eager execution only. For
    packed sequences they are [Tq], of all rows. For a cache they belong to its positions: without
    ``key_ids``, a query has the id of its position.

    >>> import torch
    >>> from fastattn import masks, scaled_dot_product_attention
    >>> x = torch.eye(4)[None, None]
    >>> mask = masks.document(torch.tensor([0, 0, 1, 1])) & masks.causal()
    >>> scaled_dot_product_attention(x, x, x, scale=0.0, mask=mask)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    query_ids = _copy_ids("ids", ids)
    copied_key_ids = None if key_ids is None else _copy_ids("key_ids", key_ids)
    description = f"<ids {list(ids.shape)}>"
    if key_ids is not None:
        description += f", <key_ids {list(key_ids.shape)}>"
    return _Documents(query_ids, copied_key_ids, f"document({description})")


def _copy_ids(name: str, ids: Any) -> Tensor:
    """Check the ids, and return a copy as int32 [B|1, L]."""
    copied = copy_as_int32("document", name, ids, "[L] or [B, L]", (1, 2))
    return copied if copied.dim() == 2 else copied[None]
