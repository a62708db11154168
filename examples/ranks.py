"""Process group, memory limit and peak memory for the examples on several ranks."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["group", "limit_memory", "peaks_of_all"]


@contextmanager
def group() -> Iterator[tuple[int, int]]:
    """This rank and the number of ranks, from torchrun; 0 and 1 without it."""
    started = dist.is_initialized()  # by the caller
    if not started and "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif not started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if not started:
            dist.destroy_process_group()


def limit_memory(mebibytes: float) -> None:
    """Let this process allocate this much more memory; further allocations fail."""
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = int((now + mebibytes * 1024) * 1024)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def peaks_of_all() -> list[float]:
    """The peak of the resident memory of each rank, in MiB."""
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    peaks = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, peak)
    return [float(x) for x in peaks]
