"""Memories, caches and modules on several ranks, against one process; and docs/sharded.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_decode
import distributed_memory
import pytest
import rank_group
import torch
from distributed_faults import SECONDS, check_messages, check_others
from distributed_runs import check_cases
from snippets import blocks, run
from torch import Tensor
from torch import distributed as dist
from within_bound import assert_right

PAGE = Path(__file__).resolve().parents[2] / "docs/sharded.md"
Group = list[Any]  # the results of each rank


def check_memory(case: distributed_memory.Case, parts: list[dict[str, Tensor]]) -> None:
    """The joined results of all ranks must be within the error bound."""
    found = distributed_memory.joined(case, parts)
    steps = found.pop("steps", None)

    def exact() -> dict[str, Tensor]:
        return {n: x for n, x in distributed_memory.definition(case).items() if n != "steps"}

    assert steps is None or torch.equal(steps, distributed_memory.definition(case)["steps"])
    if case.dtype is torch.float64:
        torch.testing.assert_close(found, exact(), rtol=1e-11, atol=1e-11)
    else:
        assert_right(found, exact, case.dtype)


def check_decode(case: distributed_decode.Case, parts: list[dict[str, Tensor]]) -> None:
    """The same for decoding; the caches must be equal."""
    found, caches = distributed_decode.joined(case, parts)
    assert_right(found, lambda: distributed_decode.definition(case), case.dtype)
    if caches:
        appended = distributed_decode.appended(case)
        torch.testing.assert_close(caches, appended, rtol=0.0, atol=0.0, equal_nan=True)


def check_modules(group: Group) -> None:
    """Modules on all ranks must give the results of one rank."""
    for rank, pairs in enumerate(group):
        for name, found, want in pairs:
            where = f"{name} on rank {rank} of {len(group)}"
            torch.testing.assert_close(
                found, want, rtol=1e-10, atol=1e-10, msg=lambda text, at=where: f"{at}: {text}"
            )


REFUSED = {
    "weights": "NotImplementedError: need_weights=True is not supported under context_parallel()",
    "method": "ValueError: context_parallel: method must be one of auto, ring, allgather, ulysses",
    "layout": "ValueError: context_parallel: layout must be a Layout or one of contiguous, zigzag",
    "add_zero_attn": "NotImplementedError: add_zero_attn is not supported",
    "tokens": "NotImplementedError: a Transformer of tokens, whose positions count from 0",
    "cache": "NotImplementedError: a cache is not supported",
}


def check_refused(group: Group) -> None:
    """Each refused call must raise its error on every rank."""
    for found in group:
        for name, message in REFUSED.items():
            assert found[name].startswith(message), found[name]


def run_page() -> list[bool]:
    """Run the blocks of docs/sharded.md on this rank of three, and check their results."""
    names: dict[str, Any] = {}
    for block in blocks(PAGE):
        run(PAGE, block, names)
    return [
        names["memory"].grad.shape == (1, 1000, 16),
        names["xi"].shape == (5, 16),
        bool((names["out"] == 1).all()),
        # 20 tokens in blocks of 8.
        int((names["keys"][0, 0, :, 0] != 0).sum()) == (8, 8, 4)[dist.get_rank()],
        all(p.grad.isfinite().all() for p in names["encoder"].parameters()),
    ]


def check_page(group: Group) -> None:
    assert group == [[True] * 5] * 3


HOP = "fastattn.distributed.memory_hop_attention"
RETRIEVE = "fastattn.distributed.hopfield_retrieve"
DECODE = "fastattn.distributed.decode_attention"
OTHERS = "on ranks 0, 2"
DIFFERENT = {
    "hops": f"RuntimeError: {HOP}: hops must be the same on all ranks, got 2 {OTHERS}; 3 on rank 1",
    "query": f"{HOP}: the values of query must be the same on all ranks, got those with checksum",
    "width": f"got float32 [2, N, 4] {OTHERS}; float32 [2, N, 5] on rank 1",
    "hop_proj": f"{HOP}: the values of hop_proj must be the same on all ranks, got those with",
    "update_steps_max": f"{RETRIEVE}: update_steps_max must be the same on all ranks, got 1",
    "beta": f"{RETRIEVE}: beta must be the same on all ranks, got 1.0 {OTHERS}; 2.0 on rank 1",
    "cache_seqlens": f"{DECODE}: cache_seqlens must be the same on all ranks, got 4 {OTHERS}; 5 on",
    "lengths": f"{DECODE}: the values of cache_seqlens must be the same on all ranks",
    "mask": f"{DECODE}: window, is_causal or mask must be the same on all ranks, got chunked(2) on",
    "relative_bias": f"{DECODE}: the values of relative_bias must be the same on all ranks",
    "dropout_p": f"{RETRIEVE}: dropout_p must be the same on all ranks, got 0.0 {OTHERS}; 0.2 on",
    "decoded query": f"{DECODE}: the values of query must be the same on all ranks",
    "sinks": f"{DECODE}: sinks must be the same on all ranks, got None {OTHERS}; float32 [1, 4] on",
    "capacity": f"ValueError: {DECODE}: positions must have as many rows as the cache of each rank,"
    " 2 on rank 1, got 3",
}
WRONG = {
    "dropout_p": f"RuntimeError: {RETRIEVE}: dropout_p must be between 0 and 1, got 1.5",
    "order": "positions must increase with the rows of each rank, those of rank 0 do not",
    "ranks": "positions must be of the 3 ranks of the group, got 2",
    "slopes": f"NotImplementedError: {DECODE}: alibi_slopes and relative_bias need consecutive pos",
    "table": "relative_bias must have shape (4, n), a row for each query head, with n odd and at "
    "least 17 for 2 queries and 9 keys, got (4, 15)",
    "bias": f"TypeError: {DECODE}(): argument 'relative_bias' must be Tensor or T5, not int",
    "mask": f"TypeError: {DECODE}(): argument 'mask' must be Mask, not Tensor",
    "documents": f"{DECODE}: mask: the ids of the keys must have length 9, got 8",
    "too long": "cache_seqlens must be at least 0, and at most 9 keys per sequence, got 10",
    "group": f"TypeError: {HOP}(): argument 'group' must be ProcessGroup, DeviceMesh or None, not",
    "check": f"TypeError: {HOP}(): argument 'check' must be bool, not int",
}


def check_disagreement(group: Group) -> None:
    """Ranks that disagree must all raise an error that names the rank."""
    check_messages(group, DIFFERENT, WRONG)
    for rank, found in enumerate(group):
        own = "ValueError: memory_hop_attention: activation must be None, 'relu'"
        others = f"RuntimeError: {HOP}: rank 1 raised " + own
        assert found["own error"].startswith(own if rank == 1 else others)
        assert found["without check"] == "no error"


CHECKS: dict[str, Callable[[Group], None]] = {
    "distributed_memory:run_cases": lambda group: check_cases(
        group, distributed_memory.CASES, check_memory
    ),
    "distributed_decode:run_cases": lambda group: check_cases(
        group, distributed_decode.CASES, check_decode
    ),
    "distributed_modules:run_modules": check_modules,
    "distributed_modules:messages": check_refused,
    "distributed_shard_faults:disagree": check_disagreement,
    "test_distributed_shards:run_page": check_page,
}


def check_all(folder: Path, jobs: list[rank_group.Job]) -> None:
    """In one launch: importing takes longer than most jobs."""
    for (name, _), group in zip(jobs, rank_group.run(folder, jobs, 60.0), strict=True):
        assert all(result is not None for result in group), f"{name}: a rank was killed"
        CHECKS[name](group)


@pytest.mark.parametrize(
    "names",
    [[*CHECKS][1:2], pytest.param([*CHECKS], marks=pytest.mark.complete)],
    ids=lambda names: names[0],
)
def test_on_three_ranks(names: list[str], tmp_path: Path) -> None:
    check_all(tmp_path, [(name, 1 if "messages" in name else 3) for name in names])


@pytest.mark.slow
def test_on_one_and_two_ranks(tmp_path: Path) -> None:
    names = [name for name in CHECKS if "run_cases" in name]
    jobs = [(name, ranks) for name in names for ranks in (1, 2)]
    check_all(tmp_path, [*jobs, ("distributed_modules:run_modules", 2)])


# By the function: the ranks, and the operator and the step that the messages name.
FAULTS = {
    "die_in_hop": (3, "memory_hop_attention", "hop 2 of 3"),
    "die_in_derivative": (3, "memory_hop_attention", "the gradient of the query of hop 2 of 3"),
    "die_in_retrieval": (3, "hopfield_retrieve", "step 2 of the retrieval"),
    "die_in_decoding": (3, "decode_attention", "the merge of the keys of all ranks"),
    "stall_in_hop": (2, "memory_hop_attention", "hop 2 of 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_the_others(name: str, tmp_path: Path) -> None:
    ranks, op, step = FAULTS[name]
    (found,) = rank_group.run(tmp_path, [(f"distributed_shard_faults:{name}", ranks)], SECONDS)
    check_others(found, ranks, step, name.startswith("stall"), op)
