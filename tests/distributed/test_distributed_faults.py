"""Ranks that disagree, end or do not answer: every other rank raises an error that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_group
import torch
from distributed_faults import SECONDS, check_messages, check_others

import fastattn

OTHERS = "on ranks 0, 2"
DIFFERENT = {
    "window": f"window or is_causal must be the same on all ranks, got (-1, -1) {OTHERS}; "
    "(4, 0) on rank 1",
    "scale": f"scale must be the same on all ranks, got 0.35355339059327373 {OTHERS}; 2.0 on rank",
    "dropout_p": f"dropout_p must be the same on all ranks, got 0.0 {OTHERS}; 0.5 on rank 1",
    "method": f"method must be the same on all ranks, got 'allgather' {OTHERS}; 'ring' on rank 1",
    "layout": f"got 'contiguous' {OTHERS}; 'zigzag' on rank 1",
    "dtype": f"dtype must be the same on all ranks, got float32 {OTHERS}; float64 on rank 1",
    "heads": "key and value must be the same on all ranks, got [B, H, L, D] of sizes "
    f"[2, 4, 'L', 8] and [2, 4, 'L', 8] {OTHERS}; ",
    "mask": f"mask must be the same on all ranks, got chunked(2) {OTHERS}; chunked(3) on rank 1",
    "sinks": f"sinks must be the same on all ranks, got None {OTHERS}; shape [1, 4] on rank 1",
    "cu_seqlens": f"cu_seqlens must be the same on all ranks, got [0, 9, 18] {OTHERS}; [0, ",
    "requires_grad": f"requires_grad must be the same on all ranks, got [] {OTHERS}; "
    "['query', 'key', 'value'] on rank 1",
    "attn_mask": f"got a float32 mask {OTHERS}; a bool mask on rank 1",
    "columns": "attn_mask must have a column for each of the 18 keys of all ranks, "
    "got 17 on rank 1",
    "positions": "the ranks must hold every position from 0 on once, position 4 is held twice",
    "ranks": "layout must be the same on all ranks, got Layout(",
    "lengths": "layout must have the lengths of the ranks, [6, 5, 6], got [6, 6, 6]",
}
WRONG = {
    "dropout_p": "fastattn.distributed.attention: dropout_p must be between 0 and 1, got 1.5",
    "cu_seqlens": "cu_seqlens must begin with 0 and not decrease, got [0, 9, 8, 18]",
    "cu_seqlens end": "cu_seqlens must end with the number of queries and of keys of all ranks, 18 "
    "and 18, got 17",
    "generator": "argument 'generator' must be torch.Generator, not int",
    "method": "must be one of auto, ring, allgather, ulysses, got 'tree'",
    "layout": "ValueError: fastattn.distributed.attention: layout must be one of contiguous, "
    "zigzag, got 'striped'",
    "layout ranks": "layout must be of the 3 ranks of the group, got 2",
    "layout without check": "layout must have the lengths of the ranks, [",
    "layout type": "TypeError: fastattn.distributed.attention(): argument 'layout' must be str, "
    "Tensor or Layout, not list",
    "layout shape": "layout must have the position of each of the 6 rows, got shape (5,)",
    "heads": "method='ulysses' needs numbers of heads that 3 ranks divide, got 2 of query and 2",
    "rank": "query must be [B, H, L, D], got shape (4, 6, 8)",
    "type": "argument 'query' must be Tensor, not int",
    "grouped": "same number of heads without enable_gqa=True, got 4 and 2",
    "mask and causal": "attn_mask should not be set when is_causal=True",
    "mask": "argument 'mask' must be Mask or BlockMask (attn_mask takes tensors), not Tensor",
    "mask size": "mask: the ids of the queries must have length 18, got 17",
    "placements": "query must be Shard(2) on one dimension of its mesh, got (Shard(dim=1),)",
    "placements differ": "value must have the mesh DeviceMesh",
    "one DTensor": "query, key and value must all be DTensors, key is not one",
    "group of DTensors": "group must be None for DTensors",
    "group": "argument 'group' must be ProcessGroup, DeviceMesh or None, not int",
}
# By the function: the ranks, and the step that the messages name.
FAULTS = {
    "die_in_comparison": (3, "the comparison of the arguments"),
    "die_in_ring": (3, "of 3 of the forward ring"),
    "die_in_backward": (3, "of 3 of the backward ring"),
    "die_in_gathering": (3, "gathering the keys"),
    "die_in_heads": (3, "the exchange of heads"),
    "stall_in_ring": (2, "step 1 of 2 of the forward ring"),
}


@pytest.mark.complete
def test_ranks_that_disagree(tmp_path: Path) -> None:
    (group,) = rank_group.run(tmp_path, [("distributed_faults:disagree", 3)])
    check_messages(group, DIFFERENT, WRONG)
    for rank, found in enumerate(group):
        own = "ValueError: fastattn.distributed.attention: softcap must be None or positive"
        others = "RuntimeError: fastattn.distributed.attention: rank 1 raised " + own
        assert found["own error"].startswith(own if rank == 1 else others)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs = [(f"distributed_faults:{name}", ranks) for name, (ranks, _) in FAULTS.items()]
    results = rank_group.run(tmp_path_factory.mktemp("faults"), jobs, SECONDS)
    return dict(zip(FAULTS, results, strict=True))


@pytest.mark.complete
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_the_others(name: str, faults: dict[str, list[Any]]) -> None:
    ranks, step = FAULTS[name]
    check_others(faults[name], ranks, step, name.startswith("stall"))


def test_without_a_group() -> None:
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized"):
        fastattn.distributed.attention(x, x, x)
