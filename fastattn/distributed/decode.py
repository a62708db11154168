"""Attention of new tokens to a cache of keys and values that is spread over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.autograd.decode import append, decode
from fastattn.backends.primitives import AppendOptions, DecodeOptions
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed._replicated import agreed, described, merged_states
from fastattn.distributed.layout import Layout
from fastattn.ops import decode as one_process

__all__ = ["decode_attention"]

_OP = "fastattn.distributed.decode_attention"


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None = None,
    *,
    group: Any = None,
    positions: Layout | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
    check: bool = True,
) -> Any:
    r"""Attend from the newest tokens of each sequence to a cache whose rows are on several ranks.

    .. math:: out_b = scaled\_dot\_product\_attention(query_b, K_b, V_b)

    where K_b and V_b are the keys and values of sequence b on all ranks. All ranks pass the same
    arguments, those of :func:`fastattn.decode_attention` on one process, but for the caches, of
    which each has some positions. All get the same result. Each rank attends to its own keys, and
    the partial results are merged in the order of ranks; B · Hq · Lq · Dv elements and the
    logarithms are sent from each rank to each other.

    Inference only: the operator has no gradient.

    Args:
        query: [B, Hq, Lq, D], the same on all ranks.
        key_cache: [E, Hkv, N, D], this rank's part. N may differ between ranks and may be 0.
        value_cache: [E, Hkv, N, Dv].
        cache_seqlens: [B], or one number: how many keys of each sequence are in the caches of all
            ranks before the call. None: the caches are full.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        positions: which positions of a sequence the rows of each rank are for, in increasing order
            on each rank. None: those of rank 0 first, then those of rank 1, and so on. Blocks that
            are dealt out one by one fill all ranks evenly.
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv], the same on all ranks: rows to append. Each
            is written, in place, on the rank that has its position.
        block_table: [B, P], the pages of this rank's part of each sequence.
        cache_batch_idx: [B], the entry of each sequence in this rank's cache.
        is_causal, scale, softcap: as in :func:`fastattn.decode_attention`.
        window: (left, right); a limit on the left needs consecutive positions on each rank.
        alibi_slopes: [Hq] or [B, Hq]; needs consecutive positions on each rank, and ``is_causal``
            if there are several queries.
        sinks: [Hq].
        layout: "bhnd" or "bnhd".
        return_lse: also return the logarithm of the sum of exponentials.
        check: compare options, shapes and the values of what is the same on all ranks before
            anything is computed. Without it the caches of all ranks must have the same capacity, or
            ``positions`` must be given.

    Returns:
        ``out`` [B, Hq, Lq, Dv]; with ``return_lse`` a tuple of it and ``lse`` [B, Hq, Lq] in
        float32 (float64 for float64). The partial results of 16-bit caches are in 16 bits, and are
        merged in float32.

    Raises:
        TypeError, ValueError: as :func:`fastattn.decode_attention`; ``positions`` that do not fit.
        RuntimeError: as :func:`fastattn.decode_attention`. Options that differ between ranks: all
            ranks raise and name the argument. A rank that ends or does not answer within the
            group's timeout: the others raise and name it.
        NotImplementedError: an option that needs consecutive positions, where they are not.
    """
    peers = Peers(process_group(group, _OP), _OP)

    def prepare() -> tuple[_Call, Callable[[], Mapping[str, str]], tuple[int, ...]]:
        _, arguments, _ = one_process.prepare(
            query,
            key_cache,
            value_cache,
            block_table=block_table,
            cache_batch_idx=cache_batch_idx,
            is_causal=is_causal,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            layout=layout,
            return_lse=return_lse,
        )
        q, keys, values, _, table, entries, slopes, logits, *_, options = arguments
        if positions is not None and not isinstance(positions, Layout):
            raise checks.wrong_type(_OP, "positions", positions, "Layout or None")
        new = None
        if key is not None or value is not None:
            new = _checked_rows(key, value, q, keys, values, cache_seqlens, layout)
        call = _Call(q, keys, values, table, entries, slopes, logits, options, new)
        capacity = keys.shape[2] * (1 if table is None else table.shape[1])
        return call, lambda: _compared(call, cache_seqlens, positions), (capacity,)

    call, numbers = agreed(peers, check, query, prepare, 1)
    cache = positions
    if cache is None:
        cache = Layout.contiguous([capacity for (capacity,) in numbers])
    else:
        known = range(peers.size) if check else [peers.rank]
        _check_positions(cache, peers.size, {rank: numbers[rank][0] for rank in known})
    _check_options(call, cache)
    added = 0 if call.new is None else call.new[0].shape[2]
    batch, device = call.query.shape[0], call.query.device
    before = one_process.lengths_before(cache_seqlens, batch, cache.total, added, device)
    if call.new is not None:
        _append(call, cache, peers.rank, before)
    out, lse = _own_part(call, cache, peers.rank, before + added)
    out, lse = merged_states(peers, "the merge of the keys of all ranks", out, lse)
    if call.sinks is not None:  # a sink of inf has the whole weight
        infinite = (call.sinks == torch.inf)[:, :, None]
        out.masked_fill_(infinite[..., None], 0.0)
        lse.masked_fill_(infinite, torch.inf)
    out = out.to(query.dtype)
    out = out.transpose(1, 2) if layout == "bnhd" else out
    if not return_lse:
        return out
    return out, lse if out.dtype is torch.float64 else lse.float()


@dataclass(frozen=True)
class _Call:
    """The arguments of the primitive, without the lengths."""

    query: Tensor  # [B, Hq, Lq, D]
    key_cache: Tensor  # [E, Hkv, N, D]
    value_cache: Tensor  # [E, Hkv, N, Dv]
    block_table: Tensor | None  # [B, P] int32
    entries: Tensor | None  # [B] int64
    alibi_slopes: Tensor | None  # [B|1, Hq]
    sinks: Tensor | None  # [1, Hq]
    options: DecodeOptions
    new: tuple[Tensor, Tensor] | None  # [B, Hkv, L, D] and [B, Hkv, L, Dv]

    @property
    def window(self) -> tuple[int, int]:
        left, right = self.options.window_left, self.options.window_right
        # No key is beyond the last query.
        return left, -1 if right >= self.query.shape[2] - 1 else right

    def each(self) -> Tensor:
        """The entries of the sequences, where they are no pages."""
        if self.entries is not None:
            return self.entries
        return torch.arange(self.query.shape[0], device=self.query.device)

    def of(self, rows: Tensor) -> _Call:
        """The call of some of the sequences, or of some more than once."""
        table = None if self.block_table is None else self.block_table[rows]
        entries = self.each()[rows] if table is None else None
        slopes = self.alibi_slopes
        slopes = slopes if slopes is None or slopes.shape[0] == 1 else slopes[rows]
        parts: dict[str, Any] = {"block_table": table, "entries": entries, "alibi_slopes": slopes}
        return replace(self, query=self.query[rows], **parts)

    def run(self, lengths: Tensor, left: int) -> tuple[Tensor, Tensor]:
        pages = (self.block_table, self.entries)
        options = replace(self.options, window_left=left, window_right=-1)
        tensors = (self.query, self.key_cache, self.value_cache, lengths, *pages)
        return decode(*tensors, self.alibi_slopes, self.sinks, *[None] * 5, options)


def _checked_rows(
    key: Any, value: Any, query: Tensor, keys: Tensor, values: Tensor, seqlens: Any, layout: str
) -> tuple[Tensor, Tensor]:
    found = []
    for name, x in (("key", key), ("value", value)):
        checks.check_tensor(_OP, name, x, "[B, H, L, D]", 4, query.device)
        checks.check_constant("decode_attention", name, x)
        if x.dtype != query.dtype:
            raise RuntimeError(
                f"{_OP}: {name} must have query's dtype {query.dtype}, got {x.dtype}"
            )
        found.append(x.transpose(1, 2) if layout == "bnhd" else x)
    new = found[0], found[1]
    one_process.check_new(new[0], new[1], query, keys, values, seqlens)
    return new


def _compared(call: _Call, seqlens: Any, positions: Layout | None) -> dict[str, str]:
    """What must be the same on all ranks, by the name of the argument."""
    found = {"cache_seqlens": repr(seqlens), "positions": repr(positions)}
    if isinstance(seqlens, Tensor):
        found |= described("cache_seqlens", seqlens)
    for name, x in (("key_cache", call.key_cache), ("value_cache", call.value_cache)):
        found[name] = f"{checks.name_of(x)} of {x.shape[1]} heads of {x.shape[3]}"
    for name, new in zip(("key", "value"), call.new or (None, None), strict=True):
        found |= described(name, new)
    found |= described("query", call.query) | described("sinks", call.sinks)
    found |= described("alibi_slopes", call.alibi_slopes)
    options = {name: repr(x) for name, x in vars(call.options).items()}
    window = f"({options.pop('window_left')}, {options.pop('window_right')})"
    return found | options | {"window or is_causal": window}


def _check_positions(cache: Layout, ranks: int, capacities: Mapping[int, int]) -> None:
    if cache.ranks != ranks:
        raise ValueError(
            f"{_OP}: positions must be of the {ranks} ranks of the group, got {cache.ranks}"
        )
    for rank, capacity in capacities.items():
        if cache.lengths[rank] != capacity:
            raise ValueError(
                f"{_OP}: positions must have as many rows as the cache of each rank, "
                f"{capacity} on rank {rank}, got {cache.lengths[rank]}"
            )
    for rank, runs in enumerate(cache.runs):
        if any(a.position > b.position for a, b in itertools.pairwise(runs)):
            raise ValueError(
                f"{_OP}: positions must increase with the rows of each rank, those of rank {rank} "
                "do not"
            )


def _check_options(call: _Call, cache: Layout) -> None:
    (left, right), queries, slopes = call.window, call.query.shape[2], call.alibi_slopes
    limited = left >= 0 or slopes is not None
    if limited and any(len(runs) > 1 for runs in cache.runs):
        raise NotImplementedError(
            f"{_OP}: window[0] and alibi_slopes need consecutive positions on each rank"
        )
    if slopes is not None and queries > 1 and right != 0:
        raise NotImplementedError(f"{_OP}: alibi_slopes with {queries} queries need is_causal=True")


def _append(call: _Call, cache: Layout, rank: int, before: Tensor) -> None:
    """Write the new rows whose positions this rank has."""
    assert call.new is not None
    key, value = call.new
    at = before[:, None] + torch.arange(key.shape[2], device=key.device)  # [B, L]
    rows = torch.full_like(at, -1)
    for run in cache.runs[rank]:
        here = (at >= run.position) & (at < run.position + run.length)
        rows = torch.where(here, at - run.position + run.row, rows)
    sequence, token = (rows >= 0).nonzero(as_tuple=True)
    if not sequence.numel():
        return
    of = call.of(sequence)  # each row as a sequence
    own = [x[sequence, :, token][:, :, None] for x in (key, value)]
    lengths = rows[sequence, token]
    where = (lengths, of.block_table, of.entries)
    append((call.key_cache, call.value_cache, *own, *where), AppendOptions())


def _own_part(call: _Call, cache: Layout, rank: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to this rank's keys of sequences of these lengths."""
    (batch, _, queries, _), slopes = call.query.shape, call.alibi_slopes
    left, right = call.window
    if call.sinks is not None:  # take part once
        finite = call.sinks.masked_fill(call.sinks == torch.inf, -torch.inf)
        call = replace(call, sinks=finite if rank == 0 else None)
    if not cache.lengths[rank]:
        return _of_no_keys(call)
    apart = queries > 1 and (left >= 0 or right >= 0 or slopes is not None)
    position = lengths - 1  # of each query
    if apart:  # each query is a sequence of its own, whose last keys it cannot see
        position = lengths[:, None] + torch.arange(-queries, 0, device=lengths.device)
        visible = lengths[:, None]
        if right >= 0:
            visible = torch.minimum(visible, position + right + 1)
        lengths = visible.expand_as(position).flatten()
        position = position.flatten()
        sequences = torch.arange(batch, device=lengths.device).repeat_interleave(queries)
        singles = call.query.transpose(1, 2).flatten(0, 1)[:, :, None]
        call = replace(call.of(sequences), query=singles)
    own = _held(cache, rank, lengths)
    # How far each query is beyond the last own key that it can see.
    beyond = position - cache.runs[rank][0].position - (own - 1)
    if left < 0:
        out, lse = call.run(own, -1)
    else:
        out, lse = _in_window(call, own, left - beyond)
    if slopes is not None:  # the kernel takes the query to be at the last key
        slopes = call.alibi_slopes
        assert slopes is not None
        distance = torch.where(own > 0, beyond, 0)[:, None]
        lse = lse - (slopes.double() * distance)[:, :, None]
    if apart:
        out = out[:, :, 0].unflatten(0, (batch, queries)).transpose(1, 2)
        lse = lse[:, :, 0].unflatten(0, (batch, queries)).transpose(1, 2)
    return out, lse


def _of_no_keys(call: _Call) -> tuple[Tensor, Tensor]:
    shape, query = call.query.shape[:3], call.query
    sinks = query.new_full((1, 1), -torch.inf) if call.sinks is None else call.sinks
    lse = sinks.double()[:, :, None].expand(shape).contiguous()
    return query.new_zeros(*shape, call.value_cache.shape[3]), lse


def _in_window(call: _Call, own: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """One query a sequence, which can see its last key and ``left`` keys before it."""
    own = torch.where(left < 0, 0, own)
    left = torch.where(left >= own, -1, left)
    out = lse = None
    for width in left.unique().tolist():
        rows = (left == width).nonzero().flatten()
        found = call.of(rows).run(own[rows], width)
        if out is None or lse is None:
            out, lse = (x.new_empty((len(own), *x.shape[1:])) for x in found)
        out[rows], lse[rows] = found
    if out is None or lse is None:
        return call.run(own, -1)
    return out, lse


def _held(cache: Layout, rank: int, lengths: Tensor) -> Tensor:
    """How many keys of sequences of these lengths a rank has."""
    found = torch.zeros_like(lengths)
    for run in cache.runs[rank]:
        found += (lengths - run.position).clamp(0, run.length)
    return found
