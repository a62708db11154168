"""Attention over ranks, beside an all-gather written by hand: what one rank sends and computes.

    for n in 1 2; do torchrun --nproc-per-node $n benchmarks/distributed.py; done

Strong scaling: the sequence has the same length on any number of ranks; weak: the rows of a rank
have. Times are medians of interleaved rounds, of the slowest rank, with one thread a rank: several
ranks on one machine share its cores and its memory, so they show overlap, not speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from fastattn.distributed import Layout, attention, plan

METHODS = ("ring", "allgather", "ulysses")


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of this rank's rows, contiguous and of equal length, with PyTorch alone."""
    key, value = (torch.cat(all_gather(x.contiguous()), 2) for x in (key, value))
    rows = torch.arange(query.shape[2]) + dist.get_rank() * query.shape[2]
    seen = rows[:, None] >= torch.arange(key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def seconds(call: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """One step, forward and backward, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    torch.autograd.grad(call(*tensors).sum(), tensors)
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def calls_of(length: int) -> dict[str, tuple[Callable[..., Tensor], str]]:
    """By name, each with the layout of the rows."""

    def of(method: str, layout: str) -> Callable[..., Tensor]:
        return lambda *x: attention(*x, is_causal=True, method=method, layout=layout)

    found = {method: (of(method, "zigzag"), "zigzag") for method in METHODS}
    return found | {"by hand": (by_hand, "contiguous")}


def measure(kind: str, length: int, sizes: dict[str, Any], rounds: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    shape = (1, sizes["heads"], length // ranks, sizes["head_dim"])
    tensors = [torch.randn(shape, generator=draw).requires_grad_() for _ in range(3)]
    calls = calls_of(length)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first is not counted
        for name, (call, _) in calls.items():
            times[name].append(seconds(call, tensors))
    if rank:
        return
    for name, (_, layout) in calls.items():
        lengths = [length // ranks] * ranks
        method = "allgather" if name == "by hand" else name
        given = getattr(Layout, layout)(lengths)
        planned = plan(given, **sizes, dtype=torch.float32, is_causal=True, backward=True)
        most = {
            field: max(getattr(share, field) for share in planned.shares[method])
            for field in ("received", "flops")
        }
        if name == "by hand":  # all keys to all ranks, their gradients back, and no pair left out
            unit = 2 * length // ranks * sizes["heads"] * sizes["head_dim"] * 4
            most = {"received": 2 * (ranks - 1) * unit, "flops": _all_pairs(length, ranks, sizes)}
        print(
            f"{kind:<7} {ranks:>5} {length:>6}  {name:<10} {most['received'] / 2**20:>8.2f} MiB "
            f"{most['flops'] / 1e9:>7.2f} GFLOP {statistics.median(times[name][1:]) * 1e3:>8.1f} ms"
        )


def _all_pairs(length: int, ranks: int, sizes: dict[str, Any]) -> int:
    """The products of a rank that excludes pairs by a mask of all of them."""
    return 14 * length * (length // ranks) * sizes["heads"] * sizes["head_dim"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="of one rank's rows, weak scaling")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    sizes = {"heads": given.heads, "head_dim": given.head_dim}
    if dist.get_rank() == 0:
        print("scaling ranks length  call         received     products     time")
    for kind, length in (("strong", given.length), ("weak", given.length * dist.get_world_size())):
        measure(kind, length, sizes, given.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
