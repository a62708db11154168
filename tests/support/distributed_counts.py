"""Traffic and work of ranks in calls of ``fastattn.distributed.attention``, counted."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_cases import B, Case, call, layout_of

from fastattn.distributed import (
    Share,
    decode_attention,
    hopfield_retrieve,
    memory_hop_attention,
    plan,
)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from rank_counter import Counter

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
    """Counts, plan and trace."""
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


def run_memories() -> dict[str, tuple[int, int]]:
    """The bytes that a rank sends for memories of few and many rows, and the page's figures."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    queries, width = 3, 8
    state = width * 4 + 8  # o in float32, lse in float64
    found = {}
    for rows in (1, 50 + rank):
        memory = torch.ones(1, rows, width, requires_grad=True)
        u = torch.ones(queries, width, requires_grad=True)
        with Counter() as counter:
            out = memory_hop_attention(u, memory, hops=2)
        found[f"hops, {rows} rows"] = counter.sent, (ranks - 1) * 2 * queries * state
        with Counter() as counter:
            torch.autograd.grad(out.sum(), (u, memory))
        of_gradient = (ranks - 1) * 2 * queries * width * 4
        found[f"gradient of hops, {rows} rows"] = counter.sent, of_gradient
        with Counter() as counter:
            hopfield_retrieve(u, memory[0], update_steps_max=2, update_steps_eps=0.0)
        steps = counter.sent // ((ranks - 1) * queries * state)
        assert 2 <= steps <= 3  # all rows are the same: a query may rest after the first
        found[f"retrieval, {rows} rows"] = counter.sent, (ranks - 1) * steps * queries * state
        cache = torch.ones(2, 1, rows, width)
        with Counter() as counter:
            decode_attention(torch.ones(2, 4, 1, width), cache, cache.clone())
        found[f"decoding, {rows} rows"] = counter.sent, (ranks - 1) * 2 * 4 * state
    return found
