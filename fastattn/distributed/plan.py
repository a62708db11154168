"""Estimates what each method sends and computes, from only the layout and the shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks
from fastattn.distributed._call import Call
from fastattn.distributed._pairs import VisiblePairs
from fastattn.distributed._ulysses import heads_divide
from fastattn.distributed.layout import Layout

_OP = "fastattn.distributed.plan"


@dataclass(frozen=True)
class Share:
    """The part of one rank in one call, forward or forward and backward."""

    sent: int  # bytes
    received: int
    flops: int  # of the matrix products, for visible pairs
    idle: float  # the fraction of time spent waiting for other ranks, if computing is the bound


@dataclass(frozen=True)
class Plan:
    """The shares of all ranks, by method; methods that cannot run are left out.

    ``method`` is the choice of ``method="auto"``.
    """

    shares: dict[str, tuple[Share, ...]]
    method: str

    def __str__(self) -> str:
        """One line per method, with the largest share of a rank."""
        header = f"{'method':<10} {'sent':>12} {'received':>12} {'GFLOP':>12} {'idle':>6}"
        lines = [header, *(self._table_row(name, shares) for name, shares in self.shares.items())]
        return "\n".join(lines)

    def _table_row(self, name: str, shares: Sequence[Share]) -> str:
        """The row of one method."""
        largest = [
            max(getattr(x, field) for x in shares) for field in ("sent", "received", "flops")
        ]
        idle = sum(x.idle for x in shares) / len(shares)
        chosen = "  <- auto" if name == self.method else ""
        sent, received = (f"{n / 2**20:>8.1f} MiB" for n in largest[:2])
        return f"{name:<10} {sent} {received} {largest[2] / 1e9:>12.1f} {idle:>6.0%}{chosen}"


@dataclass(frozen=True)
class _Sizes:
    """The sizes that a plan depends on."""

    queries: Layout
    keys: Layout
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    item_size: int  # bytes of an element
    window: tuple[int, int]
    backward: bool


def plan(
    layout: Layout,
    *,
    batch: int = 1,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    backward: bool = False,
) -> Plan:
    """Estimate the bytes and FLOPs of each rank in a call of :func:`attention`.

    Nothing runs, and there are no messages. The estimate ignores masks, their exclusions and their
    messages.

    Args:
        layout: the positions of all ranks, of queries and keys.
        batch: B.
        heads: Hq.
        kv_heads: Hkv; None: ``heads``.
        head_dim: D.
        value_dim: Dv; None: ``head_dim``.
        dtype: the dtype of query, key and value.
        is_causal: as in :func:`attention`.
        window: as in :func:`attention`.
        backward: add the backward pass.

    Example:
        >>> from fastattn.distributed import Layout, plan
        >>> lengths = [1024] * 4
        >>> for layout in (Layout.contiguous(lengths), Layout.zigzag(lengths)):
        ...     shares = plan(layout, heads=6, head_dim=64, is_causal=True).shares["ring"]
        ...     print([f"{share.idle:.2f}" for share in shares])
        ['0.86', '0.57', '0.29', '0.00']
        ['0.00', '0.00', '0.00', '0.00']
    """
    if not isinstance(layout, Layout):
        raise checks.wrong_type(_OP, "layout", layout, "Layout")
    left, right = (-1, -1) if window is None else checks.check_window(_OP, window)
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    sizes = _Sizes(
        queries=layout,
        keys=layout,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        width=head_dim,
        value_width=value_dim,
        item_size=dtype.itemsize,
        window=(left, 0 if is_causal else right),
        backward=backward,
    )
    shares = _shares(sizes)
    return Plan(dict(shares), _method_with_fewest_bytes(shares))


def cheapest(call: Call, ranks: int) -> str:
    """The method that ``method="auto"`` chooses."""
    # Ulysses would have to exchange the rows of a mask, too. Only the ring has a kernel for the
    # gradient of slopes.
    needs_slopes = call.alibi_slopes is not None and call.alibi_slopes.requires_grad
    if call.attn_mask is not None or needs_slopes or not heads_divide(call, ranks):
        return "ring"
    if ranks == 1:
        return "allgather"
    sizes = _Sizes(
        queries=call.queries,
        keys=call.keys,
        batch=call.query.shape[0],
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        width=call.query.shape[3],
        value_width=call.value.shape[3],
        item_size=call.query.element_size(),
        window=call.window,
        backward=False,
    )
    return _method_with_fewest_bytes(_shares(sizes))


def _method_with_fewest_bytes(shares: Any) -> str:
    """Of ring and Ulysses, the method whose busiest rank receives fewer bytes."""
    busiest = {
        name: max(x.received for x in shares_of_method)
        for name, shares_of_method in shares
        if name != "allgather"
    }
    return min(busiest, key=lambda name: busiest[name])


@functools.lru_cache(maxsize=64)
def _shares(sizes: _Sizes) -> tuple[tuple[str, tuple[Share, ...]], ...]:
    """The shares of the ranks by method, for the methods that can run."""
    shares = [
        ("ring", _key_shares(sizes, ring=True)),
        ("allgather", _key_shares(sizes, ring=False)),
    ]
    ranks = sizes.queries.ranks
    if sizes.heads % ranks == 0 and sizes.kv_heads % ranks == 0:
        shares.append(("ulysses", _head_shares(sizes)))
    return tuple(shares)


class _Counts(NamedTuple):
    """The pairs that each rank computes and the keys that it needs; tensors int64 [ranks]."""

    pairs: Tensor  # the pairs that are visible to the queries of a rank
    busiest: int  # the sum over the steps of the ring of the busiest rank's pairs
    reach: Tensor  # the steps that the keys of a rank travel in the ring
    receivers: Tensor  # the number of other ranks that need the keys of a rank
    needed: Tensor  # the number of keys of other ranks that a rank needs


@functools.lru_cache(maxsize=64)
def _count_pairs(queries: Layout, keys: Layout, window: tuple[int, int]) -> _Counts:
    """Count pairs, steps and keys of all ranks from the layouts."""
    n = keys.ranks
    visible, lengths = VisiblePairs(keys, window), _lengths(keys)
    pairs, reach, receivers, needed, busiest_of_step = torch.zeros(5, n, dtype=torch.int64)
    descending = torch.arange(2 * n, 0, -1) % n
    for q, runs in enumerate(queries.runs):
        pairs_by_owner = visible.count(runs)  # by the rank of the keys
        pairs[q] = pairs_by_owner.sum()
        by_step = pairs_by_owner.flip(0).roll(q + 1)  # by the steps from that rank
        torch.maximum(busiest_of_step, by_step, out=busiest_of_step)
        needs = pairs_by_owner > 0
        steps = descending[n - q : 2 * n - q]  # from each rank to this one
        torch.maximum(reach, steps * needs, out=reach)
        needs[q] = False
        receivers += needs
        needed[q] = (lengths * needs).sum()
    return _Counts(pairs, int(busiest_of_step.sum()), reach, receivers, needed)


def _lengths(layout: Layout) -> Tensor:
    """The number of rows of each rank, int64 [ranks]."""
    return torch.tensor(layout.lengths, dtype=torch.int64)


def _key_shares(sizes: _Sizes, *, ring: bool) -> tuple[Share, ...]:
    """The shares of the ring, or of gathering the keys before attention."""
    counts = _count_pairs(sizes.queries, sizes.keys, sizes.window)
    lengths, reach = _lengths(sizes.keys), counts.reach
    if ring:  # keys pass every rank on their way, and their gradients follow one step behind
        sent, received = _passing(lengths, 0, reach - 1), _passing(lengths, 1, reach)
        gradients_received = _passing(lengths, 2, reach) + lengths * (reach > 0)
    else:
        sent, received = lengths * counts.receivers, counts.needed
        gradients_received = sent
    # The ring sends keys in both passes; gathered keys are kept. Gradients return in float32.
    key_bytes = sizes.item_size * (2 if ring and sizes.backward else 1)
    gradient_bytes = max(sizes.item_size, 4) if sizes.backward else 0
    row_size = sizes.batch * sizes.kv_heads * (sizes.width + sizes.value_width)
    bytes_out = (sent * key_bytes + received * gradient_bytes) * row_size
    bytes_in = (received * key_bytes + gradients_received * gradient_bytes) * row_size
    critical_path = counts.busiest if ring else int(counts.pairs.max())
    flops_of_pair = _flops(sizes)
    return tuple(
        Share(sent_bytes, received_bytes, pairs * flops_of_pair, _idle(pairs, critical_path))
        for sent_bytes, received_bytes, pairs in zip(
            bytes_out.tolist(), bytes_in.tolist(), counts.pairs.tolist(), strict=True
        )
    )


def _passing(lengths: Tensor, first: int, last: Tensor) -> Tensor:
    """How many keys pass each rank, int64 [ranks]: the keys ``lengths[k]`` of all ranks k that are
    ``first`` to ``last[k]`` steps before it."""
    n = lengths.numel()
    ranks, lengths = torch.arange(n), lengths * (last >= first)
    changes = lengths.new_zeros(2 * n + 2)
    changes.index_add_(0, ranks + first, lengths)
    changes.index_add_(0, ranks + torch.clamp(last, min=first - 1) + 1, lengths, alpha=-1)
    return changes.cumsum(0)[: 2 * n].view(2, n).sum(0)  # adds the second turn around the ring


def _head_shares(sizes: _Sizes) -> tuple[Share, ...]:
    """The shares of Ulysses, which exchanges heads for rows."""
    n = sizes.queries.ranks
    pairs = int(_count_pairs(sizes.queries, sizes.keys, sizes.window).pairs.sum())
    # Bytes of a row of all heads: query sent, output and lse returned; key and value sent.
    widths = sizes.width + sizes.value_width
    query_bytes = sizes.batch * sizes.heads * sizes.width * sizes.item_size
    result_bytes = sizes.batch * sizes.heads * (sizes.value_width * sizes.item_size + 8)
    key_bytes = sizes.batch * sizes.kv_heads * widths * sizes.item_size
    flops = pairs * _flops(sizes) // n
    shares = []
    for rows, columns in zip(sizes.queries.lengths, sizes.keys.lengths, strict=True):
        other_rows, other_columns = sizes.queries.total - rows, sizes.keys.total - columns
        # This rank's rows of other ranks' heads; other ranks' rows of this rank's heads.
        all_sent = (rows * query_bytes + columns * key_bytes) * (n - 1) + other_rows * result_bytes
        all_received = (
            other_rows * query_bytes + other_columns * key_bytes + rows * result_bytes * (n - 1)
        )
        sent, received = all_sent // n, all_received // n
        if sizes.backward:  # the gradients go the other way
            sent, received = sent + received, sent + received
        shares.append(Share(sent, received, flops, 0.0))
    return tuple(shares)


def _flops(sizes: _Sizes) -> int:
    """The FLOPs of one pair in all heads: two products forward, five backward."""
    forward = sizes.width + sizes.value_width
    backward = 3 * sizes.width + 2 * sizes.value_width
    both = forward + (backward if sizes.backward else 0)
    return 2 * both * sizes.batch * sizes.heads


def _idle(work: int, total_work: int) -> float:
    """The fraction of the time in which a rank with ``work`` waits, if all take ``total_work``."""
    return 1 - work / total_work if total_work else 0.0
