"""Calls on memories and caches of several ranks that fail, run on each rank of a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from distributed_faults import die, failing, message_of, messages, stall

from fastattn import masks
from fastattn.distributed import Layout, decode_attention, hopfield_retrieve, memory_hop_attention


def hop(query: float = 1.0, rows: int = 3, **options: Any) -> Any:
    """A call of memory hops whose arguments may differ between ranks."""
    width = options.pop("width", 4)
    u = torch.full((2, width), query, requires_grad=True)
    return memory_hop_attention(u, torch.ones(2, rows, width), **options)


def retrieve(**options: Any) -> Any:
    """A call of Hopfield retrieval."""
    state = torch.ones(2, 4, requires_grad=True)
    return hopfield_retrieve(state, torch.eye(4), **options)


def decode(rows: int = 3, query: float = 1.0, **options: Any) -> Any:
    """A call of decoding."""
    cache = torch.ones(2, 2, rows, 4)
    return decode_attention(torch.full((2, 4, 2, 4), query), cache, cache.clone(), **options)


# Each makes a wrong call on rank 1, a right one on the others.
DIFFERENT: dict[str, Callable[[bool], Any]] = {
    "hops": lambda odd: hop(hops=3 if odd else 2),
    "query": lambda odd: hop(2.0 if odd else 1.0),
    "width": lambda odd: hop(width=5 if odd else 4),
    "hop_proj": lambda odd: hop(hop_proj=torch.ones(4, 4) * (2 if odd else 1)),
    "own error": lambda odd: hop(activation="gelu" if odd else None),
    "update_steps_max": lambda odd: retrieve(update_steps_max=2 if odd else 1),
    "beta": lambda odd: retrieve(beta=2.0 if odd else 1.0),
    "cache_seqlens": lambda odd: decode(cache_seqlens=5 if odd else 4),
    "mask": lambda odd: decode(mask=masks.chunked(3 if odd else 2)),
    "relative_bias": lambda odd: decode(relative_bias=torch.full((4, 17), 1.0 + odd)),
    "dropout_p": lambda odd: retrieve(dropout_p=0.2 if odd else 0.0),
    "lengths": lambda odd: decode(cache_seqlens=torch.tensor([1, 5 if odd else 4])),
    "decoded query": lambda odd: decode(query=2.0 if odd else 1.0),
    "sinks": lambda odd: decode(sinks=torch.ones(4) if odd else None),
    "capacity": lambda odd: decode(2 if odd else 3, positions=Layout.contiguous([3, 3, 3])),
}
# All ranks make the same wrong call.
WRONG: dict[str, Callable[[], Any]] = {
    "dropout_p": lambda: retrieve(dropout_p=1.5),
    "order": lambda: decode(
        positions=Layout.of_positions([torch.tensor(x) for x in ([1, 0, 2], [3, 4, 5], [6, 7, 8])])
    ),
    "ranks": lambda: decode(positions=Layout.contiguous([3, 3])),
    "slopes": lambda: decode(positions=Layout.zigzag([3, 3, 3]), alibi_slopes=torch.ones(4)),
    "table": lambda: decode(relative_bias=torch.ones(4, 15)),
    "bias": lambda: decode(relative_bias=1),
    "mask": lambda: decode(mask=torch.ones(2, 9)),
    "documents": lambda: decode(mask=masks.document(torch.zeros(8, dtype=torch.int64))),
    "too long": lambda: decode(cache_seqlens=10),
    "group": lambda: hop(group=0),
    "check": lambda: hop(check=1),
}


def disagree() -> dict[str, str]:
    """The errors of calls on which the ranks disagree."""
    found = messages(DIFFERENT, WRONG) | {"afterwards": message_of(hop)}
    return found | {"without check": message_of(lambda: hop(check=False))}


fail = partial(failing, hop)
three_hops = partial(hop, hops=3)
die_in_hop = partial(fail, "hop 2 of 3", die, three_hops)
die_in_derivative = partial(fail, "the gradient of the query of hop 2 of 3", die, three_hops)
die_in_retrieval = partial(
    fail, "step 2 of the retrieval", die, partial(retrieve, update_steps_max=3)
)
die_in_decoding = partial(fail, "the merge of the keys of all ranks", die, decode)
stall_in_hop = partial(fail, "hop 2 of 3", stall, three_hops)
