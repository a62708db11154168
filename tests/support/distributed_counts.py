"""What ranks send and compute in calls of ``fastattn.distributed.attention``, counted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from distributed_cases import B, Case, call, layout_of

from fastattn.distributed import Share, plan
from fastattn.distributed._peers import Exchange, Peers
from fastattn.library import Operator

BACKWARD = "_backward"
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


class Counter:
    """Counts within a block, and notes what begins and ends in which order."""

    def __init__(self) -> None:
        self.sent = self.received = self.flops = 0
        self.trace: list[str] = []
        self._patches = (
            mock.patch.object(Peers, "exchange", self._watched(Peers.exchange)),
            mock.patch.object(Exchange, "wait", self._waited(Exchange.wait)),
            mock.patch.object(Operator, "_run", self._computed(Operator._run)),
        )

    def __enter__(self) -> Counter:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _watched(self, exchange: Any) -> Any:
        def watched(peers: Peers, sends: Any, receives: Any, step: str) -> Any:
            if "comparison" not in step:
                self.sent += sum(x.numel() * x.element_size() for x in sends.values())
                self.received += sum(x.numel() * x.element_size() for x in receives.values())
                self.trace.append(f"start {step}")
            return exchange(peers, sends, receives, step)

        return watched

    def _waited(self, wait: Any) -> Any:
        def waited(exchange: Exchange) -> None:
            wait(exchange)
            if "comparison" not in exchange._step:
                self.trace.append(f"end {exchange._step}")

        return waited

    def _computed(self, run: Any) -> Any:
        def computed(operator: Operator, backend: str, tensors: Any, options: Any) -> Any:
            if operator.name.startswith("scaled_dot_product_attention"):
                back = operator.name.endswith(BACKWARD)
                query, key, value = tensors[3:6] if back else tensors[:3]
                self.flops += _flops(query, key, value, options, back)
                self.trace.append("compute")
            return run(operator, backend, tensors, options)

        return computed


def _flops(query: Any, key: Any, value: Any, options: Any, back: bool) -> int:
    """Of the matrix products of the visible pairs."""
    rows, columns = torch.arange(query.shape[2]), torch.arange(key.shape[2])
    distance = rows[:, None] + options.offset - columns
    seen = torch.ones_like(distance, dtype=torch.bool)
    if options.window_left >= 0:
        seen &= distance <= options.window_left
    if options.window_right >= 0:
        seen &= distance >= -options.window_right
    width, value_width = query.shape[3], value.shape[3]
    products = 3 * width + 2 * value_width if back else width + value_width
    return 2 * products * int(seen.sum()) * query.shape[0] * query.shape[1]


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
