"""Ranks in network namespaces of their own: slow, lossy and broken networks."""

from __future__ import annotations

from pathlib import Path

import distributed_network
import network
import pytest
import rank_group
from distributed_faults import SECONDS
from distributed_runs import check_cases
from test_distributed_attention import check_attention
from test_distributed_shards import check_decode, check_memory

pytestmark = pytest.mark.slow

RANKS = 3


def check(folder: Path, names: list[str]) -> None:
    """Every method, memories and caches, as on one process."""
    job = ("distributed_network:run_cases", RANKS)
    (group,) = rank_group.run(folder, [job], 60.0, names)
    of_attention, of_memories, of_caches = zip(*group, strict=True)
    check_cases(of_attention, distributed_network.CASES, check_attention)
    check_cases(of_memories, distributed_network.MEMORY_CASES, check_memory)
    check_cases(of_caches, distributed_network.DECODE_CASES, check_decode)


def test_late_messages(tmp_path: Path) -> None:
    with network.network(RANKS, delay=0.005) as names:
        check(tmp_path, names)


def test_lost_packets(tmp_path: Path) -> None:
    with network.network(RANKS, loss=0.02) as names:
        check(tmp_path, names)
        assert all(network.dropped(name) for name in names)


def test_a_narrow_network_carries_the_bytes_of_the_plan(tmp_path: Path) -> None:
    rate = 80e6  # bits a second
    with network.network(RANKS, rate="80mbit") as names:
        job = ("distributed_network:measured", RANKS)
        (group,) = rank_group.run(tmp_path, [job], 60.0, names)
    for rank, found in enumerate(group):
        assert found.keys() == {"ring", "allgather"}  # 3 ranks do not divide 4 heads
        for method, (arrived, planned, seconds) in found.items():
            where = f"{method} on rank {rank}: {arrived} bytes, {planned} planned"
            # Headers of packets, their acknowledgements, and the barrier.
            assert planned < arrived < 1.1 * planned + 100_000, where
            assert seconds > 0.5 * 8 * planned / rate, f"{where} in {seconds} s: not narrow"


def test_a_rank_without_its_network_ends_the_others(tmp_path: Path) -> None:
    with network.network(RANKS) as names:
        job = ("distributed_network:unplugged", RANKS)
        (group,) = rank_group.run(tmp_path, [job], SECONDS, names)
    for rank, (message, seconds) in enumerate(group):
        want = f"RuntimeError: fastattn.distributed.attention: rank {rank} got no answer from rank "
        assert message.startswith(want), message
        assert seconds < 2 * SECONDS
    assert any("from rank 1 in" in message for message, _ in (group[0], group[2]))
