"""Counts what a rank sends, receives and computes in ``fastattn.distributed.attention``."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch

from fastattn.distributed._peers import Exchange, Peers
from fastattn.library import Operator

__all__ = ["Counter"]

_BACKWARD = "_backward"


class Counter:
    """Counts within a block, and notes what begins and ends in which order."""

    def __init__(self) -> None:
        self.sent = self.received = self.flops = 0  # bytes, and those of the products
        self.trace: list[str] = []
        self._patches = (
            mock.patch.object(Peers, "exchange", self._watched(Peers.exchange)),
            mock.patch.object(Exchange, "wait", self._waited(Exchange.wait)),
            mock.patch.object(Operator, "primitive", self._counted(Operator.primitive)),
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

    def _counted(self, primitive: Any) -> Any:
        def counted(operator: Operator, backend: str) -> Any:
            function = primitive(operator, backend)
            if not operator.name.startswith("scaled_dot_product_attention"):
                return function

            @functools.wraps(function)
            def compute(*tensors: Any, options: Any) -> Any:
                back = operator.name.endswith(_BACKWARD)
                query, key, value = tensors[3:6] if back else tensors[:3]
                self.flops += _flops(query, key, value, options, back)
                self.trace.append("compute")
                return function(*tensors, options=options)

            return compute

        return counted


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
