"""Calls over ranks whose messages take time, queue or get lost; run on each rank of a group."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import distributed_cases
import distributed_decode
import distributed_faults
import distributed_memory
import torch
import torch.distributed as dist
from distributed_runs import run_twice

from fastattn.distributed import Layout, attention, plan

NAMES = "causal-zigzag-uneven mask-added grouped-allgather causal-bf16-ulysses documents dropout"
CASES = [case for case in distributed_cases.CASES if case.name in NAMES.split()]
MEMORY_CASES = distributed_memory.CASES[:2]
DECODE_CASES = distributed_decode.CASES[:3]
SIZES: dict[str, Any] = {"heads": 4, "head_dim": 64}
LENGTH = 600  # rows of a rank


def run_cases() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The results of all cases: attention, memory, decoding."""
    return (
        distributed_cases.run_cases(CASES),
        run_twice(distributed_memory.call, MEMORY_CASES),
        run_twice(distributed_decode.call, DECODE_CASES, ("out", "lse")),
    )


def received() -> int:
    """The bytes that this namespace's device has received."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[0])
    raise AssertionError("no eth0")


def measured() -> dict[str, tuple[int, int, float]]:
    """For a step by each method: bytes received, bytes planned, and seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout.zigzag([LENGTH] * ranks)
    planned = plan(layout, **SIZES, dtype=torch.float32, is_causal=True, backward=True)
    shape = (1, SIZES["heads"], LENGTH, SIZES["head_dim"])
    tensors = [torch.ones(shape, requires_grad=True) for _ in range(3)]
    found = {}
    for method in planned.shares:
        dist.barrier()
        before, begin = received(), time.monotonic()
        out = attention(*tensors, is_causal=True, layout=layout, method=method, check=False)
        torch.autograd.grad(out.sum(), tensors)
        dist.barrier()  # the last byte has arrived
        arrived = received() - before
        seconds = time.monotonic() - begin
        found[method] = arrived, planned.shares[method][rank].received, seconds
    return found


def unplugged() -> tuple[str, float]:
    """Rank 1 loses its network: its messages are lost, and its connections stay open."""
    take_down = functools.partial(
        subprocess.run, ["ip", "link", "set", "eth0", "down"], check=True, env=os.environ
    )
    return distributed_faults.fail(
        "step 2 of 3 of the forward ring", take_down, distributed_faults.ring
    )
