"""What each method sends and computes, from the layout and the shapes alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastattn import checks
from fastattn.distributed._call import Call
from fastattn.distributed._ulysses import heads_divide
from fastattn.distributed.layout import Layout, Run

__all__ = ["Plan", "Share", "cheapest", "plan"]

_OP = "fastattn.distributed.plan"


@dataclass(frozen=True)
class Share:
    """The part of one rank in one call, forward or forward and backward."""

    sent: int  # bytes
    received: int
    flops: int  # of the matrix products, for visible pairs
    idle: float  # the part of the time that it waits for other ranks, where computing sets the pace


@dataclass(frozen=True)
class Plan:
    """The shares of all ranks, by method; methods that cannot run are left out.

    ``method`` is that of ``method="auto"``.
    """

    shares: dict[str, tuple[Share, ...]]
    method: str

    def __str__(self) -> str:
        """A line for each method, with the largest share of a rank."""
        header = f"{'method':<10} {'sent':>12} {'received':>12} {'GFLOP':>12} {'idle':>6}"
        lines = [header, *(self._line(name, of) for name, of in self.shares.items())]
        return "\n".join(lines)

    def _line(self, name: str, shares: Sequence[Share]) -> str:
        most = [max(getattr(x, field) for x in shares) for field in ("sent", "received", "flops")]
        idle = sum(x.idle for x in shares) / len(shares)
        chosen = "  <- auto" if name == self.method else ""
        sent, received = (f"{n / 2**20:>8.1f} MiB" for n in most[:2])
        return f"{name:<10} {sent} {received} {most[2] / 1e9:>12.1f} {idle:>6.0%}{chosen}"


@dataclass(frozen=True)
class _Sizes:
    """What a plan depends on."""

    queries: Layout
    keys: Layout
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    item: int  # bytes of an element
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
    """Return what each rank sends, receives and computes in a call of :func:`attention`.

    Nothing runs, and no other rank is asked. Masks are not known here, and their exclusions and
    messages are left out.

    Args:
        layout: the positions of all ranks, of queries and keys.
        batch: B.
        heads: Hq.
        kv_heads: Hkv; None: ``heads``.
        head_dim: D.
        value_dim: Dv; None: ``head_dim``.
        dtype: that of query, key and value.
        is_causal: as in :func:`attention`.
        window: as in :func:`attention`.
        backward: add the backward pass.

    Example:
        >>> from fastattn.distributed import Layout, plan
        >>> lengths = [1024] * 4
        >>> for layout in (Layout.contiguous(lengths), Layout.zigzag(lengths)):
        ...     found = plan(layout, heads=6, head_dim=64, is_causal=True)
        ...     print([f"{share.idle:.2f}" for share in found.shares["ring"]])
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
        item=dtype.itemsize,
        window=(left, 0 if is_causal else right),
        backward=backward,
    )
    shares = _shares(sizes)
    return Plan(dict(shares), _fewest(shares))


def cheapest(call: Call, ranks: int) -> str:
    """The method of ``method="auto"``."""
    # Ulysses would have to exchange the rows of a mask, too. Only the ring has a kernel for the
    # gradient of slopes.
    if call.attn_mask is not None or _needs_slopes(call) or not heads_divide(call, ranks):
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
        item=call.query.element_size(),
        window=call.window,
        backward=False,
    )
    return _fewest(_shares(sizes))


def _needs_slopes(call: Call) -> bool:
    return call.alibi_slopes is not None and call.alibi_slopes.requires_grad


def _fewest(shares: Any) -> str:
    """Of ring and Ulysses, the one whose busiest rank receives fewer bytes."""
    most = {name: max(x.received for x in of) for name, of in shares if name != "allgather"}
    return min(most, key=lambda name: most[name])


@functools.lru_cache(maxsize=64)
def _shares(sizes: _Sizes) -> tuple[tuple[str, tuple[Share, ...]], ...]:
    found = [("ring", _of_keys(sizes, True)), ("allgather", _of_keys(sizes, False))]
    ranks = sizes.queries.ranks
    if sizes.heads % ranks == 0 and sizes.kv_heads % ranks == 0:
        found.append(("ulysses", _of_heads(sizes)))
    return tuple(found)


def _of_keys(sizes: _Sizes, ring: bool) -> tuple[Share, ...]:
    """Of the methods that move keys."""
    ranks = range(sizes.queries.ranks)
    n = len(ranks)
    # Pairs of the queries of rank q and the keys of rank k.
    pairs = [
        [_pairs(queries, keys, sizes.window) for keys in sizes.keys.runs]
        for queries in sizes.queries.runs
    ]
    reach = [max((d for d in ranks if pairs[(k + d) % n][k]), default=0) for k in ranks]
    blocks = [
        sizes.batch * sizes.kv_heads * length * (sizes.width + sizes.value_width)
        for length in sizes.keys.lengths
    ]
    # The ring sends keys in both passes, the gathered ones are kept. Gradients return in float32.
    of_keys = sizes.item * (2 if ring and sizes.backward else 1)
    of_gradients = max(sizes.item, 4) if sizes.backward else 0
    sent, received = [0] * n, [0] * n
    for k in ranks:
        for d in range(1, reach[k] + 1):
            taker = (k + d) % n
            if not (ring or pairs[taker][k]):
                continue
            giver = (k + d - 1) % n if ring else k
            back = (k + d + 1) % n if ring and d < reach[k] else k
            for source, target, item in ((giver, taker, of_keys), (taker, back, of_gradients)):
                sent[source] += blocks[k] * item
                received[target] += blocks[k] * item
    if ring:
        steps = [max(pairs[q][(q - s) % n] for q in ranks) for s in ranks]
        whole = sum(steps)
    else:
        whole = max(sum(row) for row in pairs)
    cost = _flops(sizes)
    return tuple(
        Share(sent[q], received[q], sum(pairs[q]) * cost, _idle(sum(pairs[q]), whole))
        for q in ranks
    )


def _of_heads(sizes: _Sizes) -> tuple[Share, ...]:
    """Of the method that exchanges heads for rows."""
    n = sizes.queries.ranks
    pairs = sum(
        _pairs(queries, keys, sizes.window)
        for queries in sizes.queries.runs
        for keys in sizes.keys.runs
    )
    rows = sizes.queries.lengths, sizes.keys.lengths
    widths = sizes.width + sizes.value_width
    # Elements of a row: query there and output back; key and value there.
    elements = sizes.batch * sizes.heads * widths, sizes.batch * sizes.kv_heads * widths
    times = 2 if sizes.backward else 1  # their gradients the other way

    def bytes_of(rank: int) -> tuple[int, int]:
        own = [of[rank] for of in rows]
        others = [sum(of) - of[rank] for of in rows]
        # Own rows of the heads of others; others' rows of own heads.
        out = sum(n_rows * e * (n - 1) // n for n_rows, e in zip(own, elements, strict=True))
        into = sum(n_rows * e // n for n_rows, e in zip(others, elements, strict=True))
        return out * times * sizes.item, into * times * sizes.item

    flops = pairs * _flops(sizes) // n
    return tuple(Share(*bytes_of(rank), flops, 0.0) for rank in range(n))


def _flops(sizes: _Sizes) -> int:
    """Of one pair in all heads: two products forward, five backward."""
    forward = sizes.width + sizes.value_width
    backward = 3 * sizes.width + 2 * sizes.value_width
    both = forward + (backward if sizes.backward else 0)
    return 2 * both * sizes.batch * sizes.heads


def _idle(own: int, whole: int) -> float:
    return 1 - own / whole if whole else 0.0


def _pairs(queries: Sequence[Run], keys: Sequence[Run], window: tuple[int, int]) -> int:
    """The number of visible pairs."""
    left, right = window
    total = 0
    for q in queries:
        for k in keys:
            apart = q.position - k.position
            seen = q.length * k.length if right < 0 else _upto(apart + right, q.length, k.length)
            hidden = 0 if left < 0 else _upto(apart - left - 1, q.length, k.length)
            total += seen - hidden
    return total


def _upto(diagonal: int, rows: int, columns: int) -> int:
    """The pairs with j <= i + diagonal of a rectangle."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    everything = triangle(diagonal + rows) - triangle(diagonal)
    beyond = triangle(diagonal + rows - columns) - triangle(diagonal - columns)
    return everything - beyond
