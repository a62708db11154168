"""Attention over ranks, beside an all-gather written by hand: what one rank receives and computes.

    python benchmarks/distributed.py                  # 1, 2, 4 and 8 ranks of this machine
    python benchmarks/distributed.py --rounds 7       # and times
    python benchmarks/distributed.py --json 'benchmarks/results/{processor}/distributed.json'

Strong scaling: the sequence has the same length on any number of ranks; weak: the rows of a rank
have. Bytes and products are counted in the calls, forward and backward, of the rank with most of
them, and compared with ``fastattn.distributed.plan``. They do not depend on the machine. Times are
medians of interleaved rounds, of the slowest rank, with one thread a rank: ranks on one machine
share its cores and its memory, so they show overlap, not speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rank_counter import Counter
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from fastattn.bench.machine import describe_environment, processor_slug
from fastattn.bench.results import json_lines
from fastattn.distributed import Layout, attention, plan

# The all-gather with a gradient; what it names in its place has none.
warnings.filterwarnings("ignore", message="torch.distributed.nn.functional.all_gather is deprec")
FORMAT = "fastattn-ranks"
METHODS = ("ring", "allgather", "ulysses")
BY_HAND = "PyTorch, by hand"
Row = dict[str, Any]


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of this rank's rows, contiguous and of equal length, with PyTorch alone."""
    key, value = (torch.cat(all_gather(x.contiguous()), 2) for x in (key, value))
    rows = torch.arange(query.shape[2]) + dist.get_rank() * query.shape[2]
    seen = rows[:, None] >= torch.arange(key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def calls_of(sizes: Row) -> dict[str, tuple[Callable[..., Tensor], str]]:
    """By name, each with the layout of the rows."""

    def of(method: str, layout: str) -> Callable[..., Tensor]:
        return lambda *x: attention(*x, is_causal=True, method=method, layout=layout)

    found = {
        method: (of(method, "zigzag"), "zigzag")
        for method in METHODS
        if method != "ulysses" or sizes["heads"] % dist.get_world_size() == 0
    }
    return found | {BY_HAND: (by_hand, "contiguous")}


def step(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Forward and backward."""
    torch.autograd.grad(call(*tensors).sum(), tensors)


def seconds(call: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """One step of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    step(call, tensors)
    return _most(time.perf_counter() - begin)


def counted(name: str, call: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[float, float]:
    """Bytes received and products of one step, of the rank with most of each."""
    if name != BY_HAND:
        with Counter() as counter:
            step(call, tensors)
        return _most(counter.received), _most(counter.flops)
    received = 0
    gather, scatter = dist.all_gather, dist.scatter  # what PyTorch calls on gloo

    def gathered(parts: list[Tensor], own: Tensor, *rest: Any, **more: Any) -> Any:
        nonlocal received
        received += sum(x.nbytes for x in parts) - own.nbytes
        return gather(parts, own, *rest, **more)

    def scattered(own: Tensor, parts: Any, source: int, *rest: Any, **more: Any) -> Any:
        nonlocal received
        received += 0 if source == dist.get_rank() else own.nbytes
        return scatter(own, parts, source, *rest, **more)

    with mock.patch.multiple(dist, all_gather=gathered, scatter=scattered):
        step(call, tensors)
    # Every pair is computed; the mask then hides some. Two products forward and five backward.
    query = tensors[0]
    pairs = query.shape[1] * query.shape[2] ** 2 * dist.get_world_size()
    return _most(received), 14 * pairs * query.shape[3]


def _most(number: float) -> float:
    most = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def measure(kind: str, length: int, sizes: Row, rounds: int) -> list[Row]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    shape = (1, sizes["heads"], length // ranks, sizes["head_dim"])
    tensors = [torch.randn(shape, generator=draw).requires_grad_() for _ in range(3)]
    calls = calls_of(sizes)
    rows = []
    for name, (call, layout) in calls.items():
        received, flops = counted(name, call, tensors)
        row = {"scaling": kind, "ranks": ranks, "length": length, "call": name}
        row |= {"received": received, "flops": flops}
        if name != BY_HAND:
            given = getattr(Layout, layout)([length // ranks] * ranks)
            planned = plan(given, **sizes, dtype=torch.float32, is_causal=True, backward=True)
            for field in ("received", "flops"):
                most = max(getattr(share, field) for share in planned.shares[name])
                row[f"{field}_planned"] = most
        rows.append(row)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, _) in calls.items():
            times[name].append(seconds(call, tensors))
    if rounds:
        rows = [row | {"ms": 1e3 * statistics.median(times[row["call"]])} for row in rows]
    return rows


def work(rank: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    sizes = {"heads": args.heads, "head_dim": args.head_dim}
    rows = measure("strong", args.length * max(args.ranks), sizes, args.rounds)
    rows += measure("weak", args.length * ranks, sizes, args.rounds)
    if rank == 0:
        (Path(folder) / f"{ranks}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--length", type=int, default=256, help="of one rank's rows, weak scaling")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=0, help="of which to take the time; 0: none")
    parser.add_argument("--json", help="where to write; {processor} is the folder of this machine")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            processes.start_processes(work, (ranks, folder, args), ranks, start_method="fork")
            rows += json.loads((Path(folder) / f"{ranks}.json").read_text())
    for row in rows:
        verdict = ""
        if "received_planned" in row:
            same = all(row[n] == row[f"{n}_planned"] for n in ("received", "flops"))
            verdict = "as planned" if same else "NOT AS PLANNED"
        print(
            f"{row['scaling']:<7} {row['ranks']:>3} {row['length']:>6}  {row['call']:<17}"
            f"{row['received'] / 2**20:>8.2f} MiB {row['flops'] / 1e9:>7.2f} GFLOP  {verdict:<14}"
            + (f" {row['ms']:>8.1f} ms" if "ms" in row else "")
        )
    if args.json:
        environment = describe_environment()
        path = Path(args.json.replace("{processor}", processor_slug(environment)))
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"heads": args.heads, "head_dim": args.head_dim, "dtype": "float32"}
        head = {"format": FORMAT, "environment": environment, "settings": settings}
        path.write_text(json_lines(head, rows=rows))


if __name__ == "__main__":
    main()
