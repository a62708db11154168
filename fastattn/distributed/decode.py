"""Attention of new tokens to a cache of keys and values that is spread over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, masks
from fastattn._untraced import untraced
from fastattn.backends.primitives import AppendOptions, DecodeOptions
from fastattn.bias import T5
from fastattn.distributed._dtensor import local_parts, refuse_dtensors
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed._replicated import LocalCall, describe, gather_and_merge, prepare_on_ranks
from fastattn.distributed.layout import Layout
from fastattn.ops import decode as one_process
from fastattn.ops._append import append, check_new_rows
from fastattn.ops.decode import decode

_OP = "fastattn.distributed.decode_attention"


@untraced
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
    relative_bias: Tensor | T5 | None = None,
    mask: masks.Mask | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
    check: bool = True,
) -> Any:
    r"""Attend from the newest tokens of each sequence to a cache whose rows are on several ranks.

    .. math:: out_b = scaled\_dot\_product\_attention(query_b, K_b, V_b)

    where K_b and V_b are the keys and values of sequence b on all ranks. All ranks pass the same
    arguments as for :func:`fastattn.decode_attention` on one process, except the caches, of which
    each rank has some positions. All ranks get the same result. Each rank attends to its own keys,
    and the partial results are merged in the order of ranks; each rank sends B · Hq · Lq · Dv
    elements and the logarithms to each other rank.

    Inference only: the operator has no gradient.

    ``query``, ``key``, ``value`` and the caches may be DTensors: the caches ``Shard`` on one
    dimension of their mesh, which is then the group, in the dimension of their keys, and the others
    ``Replicate`` there. Other dimensions may share the batch (``Shard(0)`` of all of them) or, as
    "bhnd", the heads. The results are DTensors, too.

    Args:
        query: [B, Hq, Lq, D], the same on all ranks.
        key_cache: [E, Hkv, N, D], this rank's part. N may differ between ranks and may be 0.
        value_cache: [E, Hkv, N, Dv].
        cache_seqlens: [B], or one number: how many keys of each sequence are in the caches of all
            ranks before the call. None: the caches are full.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        positions: which positions of a sequence each rank holds, in increasing order on each rank.
            None: rank 0 has the first positions, then rank 1, and so on. Small blocks that are
            assigned to the ranks in turn fill all ranks evenly.
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv], the same on all ranks: rows to append. Each
            is written, in place, on the rank that has its position.
        block_table: [B, P], the pages of this rank's part of each sequence.
        cache_batch_idx: [B], the entry of each sequence in this rank's cache.
        is_causal, scale, window, softcap, sinks: as in :func:`fastattn.decode_attention`.
        alibi_slopes, relative_bias: as in :func:`fastattn.decode_attention`; they need consecutive
            positions on each rank.
        mask: as in :func:`fastattn.decode_attention`, for the positions on all ranks; no draft
            tree.
        layout: "bhnd" or "bnhd".
        return_lse: also return the logarithm of the sum of exponentials.
        check: compare options, shapes and the values of replicated arguments before anything is
            computed. Without it the caches of all ranks must have the same capacity, or
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
        NotImplementedError: ``alibi_slopes`` or ``relative_bias`` without consecutive positions.
    """
    others = {"cache_seqlens": cache_seqlens, "alibi_slopes": alibi_slopes, "sinks": sinks}
    entries = {"block_table": block_table, "cache_batch_idx": cache_batch_idx}
    refuse_dtensors(_OP, **others, **entries, relative_bias=relative_bias)
    bhnd = layout == "bhnd"
    rows = {"key_cache": (key_cache, 1 + bhnd), "value_cache": (value_cache, 1 + bhnd)}
    whole = {"query": query, "key": key, "value": value}
    parts, group, restore = local_parts(_OP, group, rows, whole, (0, 1) if bhnd else (0,))
    key_cache, value_cache, query, key, value = parts.values()
    peers = Peers(process_group(group, _OP), _OP)

    def prepare_local() -> LocalCall[_Call]:
        """Check this rank's arguments."""
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
        q, keys, values, _, table, entries, slopes, sink_logits, *_, options = arguments
        if positions is not None and not isinstance(positions, Layout):
            raise checks.wrong_type(_OP, "positions", positions, "Layout or None")
        new_rows = None
        if key is not None or value is not None:
            new_rows = _check_new_rows(key, value, q, keys, values, cache_seqlens, layout)
        if relative_bias is not None and not isinstance(relative_bias, (Tensor, T5)):
            raise checks.wrong_type(_OP, "relative_bias", relative_bias, "Tensor or T5")
        bias_table = relative_bias.table if isinstance(relative_bias, T5) else relative_bias
        checks.check_constant(_OP, "relative_bias", bias_table)
        visible = _mask_with_window(mask, options.window_left, options.window_right, q)
        options = replace(options, window_left=-1, window_right=-1)
        biases = (slopes, sink_logits, relative_bias)
        call = _Call(q, keys, values, table, entries, *biases, visible, options, new_rows)
        return call, lambda: _options_to_compare(call, cache_seqlens, positions), (call.capacity,)

    call, numbers = prepare_on_ranks(peers, check, query, prepare_local, numbers=1)
    cache = positions
    if cache is None:
        cache = Layout.contiguous([capacity for (capacity,) in numbers])
    else:
        known_ranks = range(peers.size) if check else [peers.rank]
        _check_positions(cache, peers.size, {rank: numbers[rank][0] for rank in known_ranks})
    biased = call.alibi_slopes is not None or relative_bias is not None
    if biased and any(len(runs) > 1 for runs in cache.runs):
        raise NotImplementedError(
            f"{_OP}: alibi_slopes and relative_bias need consecutive positions on each rank"
        )
    added = 0 if call.new_rows is None else call.new_rows[0].shape[2]
    batch, device = call.query.shape[0], call.query.device
    before = one_process.check_lengths(cache_seqlens, batch, cache.total, added, device)
    filled = before + added
    table = program = None
    if call.relative_bias is not None:
        table = one_process.fold_table(call.relative_bias, call.query, filled, cache.total)
    if call.mask is not None:
        part = (call.capacity, filled, _spans_of_rank(cache, peers.rank), cache.total)
        program = masks.part_of_cache_program(_OP, call.mask, call.query, *part)
    if call.new_rows is not None:
        _append(call, cache, peers.rank, before)
    out, lse = _attend_to_own_keys(call, cache, peers.rank, filled, table, program)
    out, lse = gather_and_merge(peers, "the merge of the keys of all ranks", out, lse)
    if call.sinks is not None:  # a sink of inf has all the weight
        infinite = (call.sinks == torch.inf)[:, :, None]
        out.masked_fill_(infinite[..., None], 0.0)
        lse.masked_fill_(infinite, torch.inf)
    out = out.to(query.dtype)
    lse = lse if out.dtype is torch.float64 else lse.float()
    out = restore(out if bhnd else out.transpose(1, 2))
    return (out, restore(lse)) if return_lse else out


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
    relative_bias: Tensor | T5 | None
    mask: masks.Mask | None  # with the window
    options: DecodeOptions  # without the window
    new_rows: tuple[Tensor, Tensor] | None  # to append, [B, Hkv, L, D] and [B, Hkv, L, Dv]

    @property
    def capacity(self) -> int:
        """The keys of a sequence that fit into this rank's cache."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return self.key_cache.shape[2] * pages

    def pages_and_entries(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of the block table, or the entries, of these sequences."""
        if self.block_table is not None:
            return self.block_table[rows], None
        return None, rows if self.entries is None else self.entries[rows]

    def run(
        self, lengths: Tensor, table: Tensor | None, program: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the first keys of this rank's caches, with a table of distances or slopes."""
        caches = (self.key_cache, self.value_cache, lengths, self.block_table, self.entries)
        # A table includes the slopes.
        biases = (None if table is not None else self.alibi_slopes, self.sinks, table, program)
        unsupported = (None, None, None)  # left padding, and scales of quantised caches
        return decode(self.query, *caches, *biases, *unsupported, self.options)


def _mask_with_window(mask: Any, left: int, right: int, query: Tensor) -> masks.Mask | None:
    """Combine a mask and a window (left, right) into one mask; None: every key is visible."""
    mask = None if mask is None else masks.cache_mask(_OP, mask)
    right = -1 if right >= query.shape[2] - 1 else right  # no key is beyond the last query
    left = -1 if left >= 2**31 else left  # beyond every key, and beyond the integers of a mask
    if (left, right) == (-1, -1):
        return mask
    window = masks.sliding_window(left, right)
    return window if mask is None else window & mask


def _check_new_rows(
    key: Any, value: Any, query: Tensor, keys: Tensor, values: Tensor, seqlens: Any, layout: str
) -> tuple[Tensor, Tensor]:
    """Check the rows to append; return them as [B, Hkv, L, D] and [B, Hkv, L, Dv]."""
    for name, x in (("key", key), ("value", value)):
        checks.check_tensor(_OP, name, x, "[B, H, L, D]", 4, query.device)
        checks.check_constant("decode_attention", name, x)
        if x.dtype != query.dtype:
            raise RuntimeError(
                f"{_OP}: {name} must have query's dtype {query.dtype}, got {x.dtype}"
            )
    if layout == "bnhd":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    check_new_rows(key, value, query, keys, values, seqlens)
    return key, value


def _options_to_compare(call: _Call, seqlens: Any, positions: Layout | None) -> dict[str, str]:
    """The options that must be the same on all ranks, by argument."""
    compared = {"cache_seqlens": repr(seqlens), "positions": repr(positions)}
    if isinstance(seqlens, Tensor):
        compared |= describe("cache_seqlens", seqlens)
    for name, x in (("key_cache", call.key_cache), ("value_cache", call.value_cache)):
        compared[name] = f"{checks.name_of(x)} of {x.shape[1]} heads of {x.shape[3]}"
    for name, new in zip(("key", "value"), call.new_rows or (None, None), strict=True):
        compared |= describe(name, new)
    compared |= describe("query", call.query) | describe("sinks", call.sinks)
    compared |= describe("alibi_slopes", call.alibi_slopes)
    bias = call.relative_bias
    if isinstance(bias, T5):
        compared |= describe("relative_bias", bias.table) | {"T5": repr(bias[1:])}
    else:
        compared |= describe("relative_bias", bias)
    compared["window, is_causal or mask"] = repr(call.mask)
    return compared | {name: repr(x) for name, x in vars(call.options).items()}


def _check_positions(cache: Layout, ranks: int, capacities: Mapping[int, int]) -> None:
    """Raise an error if ``positions`` do not fit the ranks, or the capacities of these ranks."""
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


def _append(call: _Call, cache: Layout, rank: int, before: Tensor) -> None:
    """Write the new rows whose positions are on this rank, in place."""
    assert call.new_rows is not None
    key, value = call.new_rows
    positions = before[:, None] + torch.arange(key.shape[2], device=key.device)  # [B, L]
    rows = torch.full_like(positions, -1)
    for run in cache.runs[rank]:
        in_run = (positions >= run.position) & (positions < run.position + run.length)
        rows = torch.where(in_run, positions - run.position + run.row, rows)
    sequence, token = (rows >= 0).nonzero(as_tuple=True)
    if not sequence.numel():
        return
    # Append each row as a separate sequence.
    single_rows = [x[sequence, :, token][:, :, None] for x in (key, value)]
    targets = (rows[sequence, token], *call.pages_and_entries(sequence))
    append((call.key_cache, call.value_cache, *single_rows, *targets), AppendOptions())


def _spans_of_rank(cache: Layout, rank: int) -> tuple[tuple[int, int], ...]:
    """(first position, length) of each run of the keys of a rank."""
    return tuple((run.position, run.length) for run in cache.runs[rank])


def _attend_to_own_keys(
    call: _Call,
    cache: Layout,
    rank: int,
    lengths: Tensor,
    table: Tensor | None,
    program: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention to this rank's keys; ``lengths`` [B] count all ranks' keys."""
    if call.sinks is not None:  # the sinks must count on one rank only
        finite = call.sinks.masked_fill(call.sinks == torch.inf, -torch.inf)
        call = replace(call, sinks=finite if rank == 0 else None)
    runs = _spans_of_rank(cache, rank)
    if not runs:
        return _empty_result(call)
    own_lengths = masks.keys_before(runs, lengths)
    # The kernel puts the last query at this rank's last key, but it is this far beyond that key.
    beyond = torch.where(own_lengths > 0, lengths - runs[0][0] - own_lengths, 0)
    slopes = call.alibi_slopes
    one_shift = call.query.shape[2] == 1 and call.sinks is None  # one shift for all scores
    if table is not None or (slopes is not None and not one_shift):
        return _attend_by_distance(call, own_lengths, beyond, table, program)
    out, lse = call.run(own_lengths, None, program)
    if slopes is not None:
        lse = lse - (slopes.double() * beyond[:, None])[:, :, None]
    return out, lse


def _attend_by_distance(
    call: _Call, lengths: Tensor, beyond: Tensor, table: Tensor | None, program: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention with a bias of distances and slopes; ``beyond`` [B] shifts the distances.

    Sequences with different shifts or slopes are in different groups, each of which is a call.
    """
    slopes, query = call.alibi_slopes, call.query
    slopes_differ = slopes is not None and slopes.shape[0] > 1
    groups = torch.arange(len(lengths), device=lengths.device) if slopes_differ else beyond
    wide = torch.promote_types(query.dtype, torch.float32)
    max_distance = max(int(lengths.max()) if lengths.numel() else 0, query.shape[2], 1) - 1
    near = torch.arange(-max_distance, max_distance + 1, device=lengths.device)
    out, lse = _empty_result(call)
    for group in groups.unique().tolist():
        in_group = groups == group
        distances = near + beyond[in_group][0]
        bias = torch.zeros((), dtype=wide, device=lengths.device)
        if table is not None:
            middle = table.shape[2] // 2
            bias = table[:, :, (distances + middle).clamp(0, 2 * middle)]
        if slopes is not None:
            factors = slopes[group if slopes_differ else 0].to(wide)
            bias = bias - factors[None, :, None] * distances.abs()
        out_of_group, lse_of_group = call.run(torch.where(in_group, lengths, 0), bias, program)
        out = torch.where(in_group[:, None, None, None], out_of_group, out)
        lse = torch.where(in_group[:, None, None], lse_of_group, lse)
    return out, lse


def _empty_result(call: _Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention to no keys, or to the sinks only."""
    shape, query = call.query.shape[:3], call.query
    sinks = query.new_full((1, 1), -torch.inf) if call.sinks is None else call.sinks
    lse = sinks.double()[:, :, None].expand(shape).contiguous()
    return query.new_zeros(*shape, call.value_cache.shape[3]), lse
