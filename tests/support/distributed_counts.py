"""What ranks send and compute in calls of ``fastattn.distributed.attention``, counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed_cases import B, Case, call, layout_of

from fastattn.bench.ranks import Counter
from fastattn.distributed import Share, plan

CASES = (
    Case("counts-ring"),
    Case("counts-ring-uneven", lengths="uneven"),
    Case("counts-ring-causal", lengths="uneven", heads=(4, 2), options={"is_causal": True}),
    Case("counts-ring-zigzag", layout="zigzag", dtype=torch.bfloat16, options={"is_causal": True}),
    Case("counts-ring-window", layout="zigzag", lengths="uneven", options={"window": (6, 2)}),
    Case("counts-ring-shuffled", layout="shuffled", options={"window": (3, 0)}),
    Case("counts-allgather", "allgather", lengths="uneven", options={"window": (6, 2)}),
    Case("counts-allgather-zigzag", "allgather", "zigzag", options={"is_causal": True}),
    Case("counts-ulysses", "ulysses", "zigzag", "uneven", heads=(8, 4), widths=(8, 12)),
)


def run_counts() -> dict[str, tuple[Share, Share, list[str]]]:
    """What is counted and planned, and the trace."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for case in CASES:
        (heads, kv_heads), (width, value_width) = case.heads, case.widths
        with Counter() as counter:
            call(case, rank, ranks)
        planned = plan(
            layout_of(case, ranks),
            batch=B,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=value_width,
            dtype=case.dtype,
            backward=True,
            **case.options,
        ).shares[case.method][rank]
        counted = Share(counter.sent, counter.received, counter.flops, planned.idle)
        found[case.name] = (counted, planned, counter.trace)
    return found
