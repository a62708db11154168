"""A memory whose rows are on several ranks: follow links through it, and recall from it.

    torchrun --nproc-per-node 4 examples/sharded_memory.py
    torchrun --nproc-per-node 4 examples/sharded_memory.py --rows 1000000
    python examples/sharded_memory.py                      # one rank, the same answers

Item i has a key, a pattern of 1 and -1, and a link to another item: the value of row i is the key
of that item. A memory hop compares a query with all keys and reads the value of the one it equals,
so K hops follow K links (`fastattn.distributed.memory_hop_attention`, Sukhbaatar et al. 2015,
https://arxiv.org/abs/1503.08895), whatever ranks the items are on. Then a fifth of each key is
inverted, and the key is recalled (`fastattn.distributed.hopfield_retrieve`, Ramsauer et al. 2021,
https://arxiv.org/abs/2008.02217).

Each rank makes its own rows and never holds another rank's. A hop sends D + 2 numbers for each
query and rank. On one rank the output is:

    100000 rows of 128 on 1 ranks, 32 queries
    8 links followed: 100.0%, ... ms a hop, 0 bytes sent by a rank
    recalled from keys with a fifth inverted: 100.0%
    peak resident memory: 577 MiB
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks import group, limit_memory, peaks_of_all
from torch import Tensor

from fastattn.distributed import hopfield_retrieve, memory_hop_attention

_MIX = (0x2545F4914F6CDD1D, 0x1B03738712FAD5C9)


def keys_of(items: Tensor, width: int) -> Tensor:
    """The patterns of items, float32 [..., width] of 1 and -1, computed from their numbers."""
    x = items[..., None] * width + torch.arange(width) + 1
    for factor in _MIX:
        x = x * factor  # modulo 2**64
        x = x ^ (x >> 29)
    return torch.where((x & (1 << 33)) == 0, 1.0, -1.0)


def linked(items: Tensor, rows: int) -> Tensor:
    """The item that each item links to: a permutation of all items."""
    factor = next(n for n in range(int(0.618 * rows) + 1, 2 * rows + 2) if math.gcd(n, rows) == 1)
    return (items * factor + 1) % rows


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The shares of links followed and of keys recalled, on this rank of the group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.limit:
        limit_memory(options.limit)
    items = torch.arange(options.rows).tensor_split(ranks)[rank]
    keys, values = (
        keys_of(items, options.width),
        keys_of(linked(items, options.rows), options.width),
    )
    draw = torch.Generator().manual_seed(options.seed)
    start = torch.randint(options.rows, (options.queries,), generator=draw)
    query = keys_of(start, options.width)

    end = start
    for _ in range(options.hops):
        end = linked(end, options.rows)
    begin = time.perf_counter()
    outputs = memory_hop_attention(
        query[None],  # [1, Q, D]: all queries read one memory
        keys[None],
        values[None],
        hops=options.hops,
        hop_proj=torch.zeros(options.width, options.width),  # the next query is the value read
        scale=options.sharpness,
    )
    seconds = (time.perf_counter() - begin) / options.hops
    followed = (outputs[0].sign() == keys_of(end, options.width)).all(1).float().mean()

    noise = torch.rand(query.shape, generator=draw) < 0.2
    out = hopfield_retrieve(
        torch.where(noise, -query, query), keys, beta=options.sharpness, update_steps_max=5
    )
    recalled = (out.sign() == query).all(1).float().mean()
    results = {"followed": float(followed), "recalled": float(recalled), "seconds": seconds}
    peaks = peaks_of_all()
    if rank == 0:
        sent = options.queries * (options.width + 2) * 4 * (ranks - 1)
        print(
            f"{options.rows} rows of {options.width} on {ranks} ranks, {options.queries} queries\n"
            f"{options.hops} links followed: {results['followed']:.1%}, "
            f"{1e3 * seconds:.1f} ms a hop, {sent} bytes sent by a rank\n"
            f"recalled from keys with a fifth inverted: {results['recalled']:.1%}\n"
            "peak resident memory: " + ", ".join(f"{peak:.0f} MiB" for peak in peaks)
        )
    return results


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="of all ranks")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--hops", type=int, default=8)
    parser.add_argument("--sharpness", type=float, default=1.0, help="scale, and beta")
    parser.add_argument("--limit", type=float, default=0, help="MiB that a rank may allocate")
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args(arguments)
    with group():
        return measure(options)


if __name__ == "__main__":
    main()
