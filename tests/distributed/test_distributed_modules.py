"""Modules under context_parallel(), against one process."""

from __future__ import annotations

from pathlib import Path

import rank_group
import torch

REFUSED = {
    "weights": "NotImplementedError: need_weights=True is not supported under context_parallel()",
    "method": "ValueError: context_parallel: method must be one of auto, ring, allgather, ulysses",
    "layout": "ValueError: context_parallel: layout must be a Layout or one of contiguous, zigzag",
    "add_zero_attn": "NotImplementedError: add_zero_attn is not supported",
    "tokens": "NotImplementedError: a Transformer of tokens, whose positions count from 0",
    "cache": "NotImplementedError: a cache is not supported",
}


def test_modules_on_shards(tmp_path: Path) -> None:
    jobs = [("distributed_modules:run_modules", ranks) for ranks in (2, 3)]
    *groups, (refused,) = rank_group.run(tmp_path, [*jobs, ("distributed_modules:messages", 1)])
    for group in groups:
        for rank, pairs in enumerate(group):
            assert pairs is not None
            for name, found, want in pairs:
                where = f"{name} on rank {rank} of {len(group)}"
                torch.testing.assert_close(
                    found, want, rtol=1e-10, atol=1e-10, msg=lambda text, at=where: f"{at}: {text}"
                )
    for name, message in REFUSED.items():
        assert refused[name].startswith(message), refused[name]
