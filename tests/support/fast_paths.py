"""Compares the fast path of an operator with its general way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import fast_path
from fastattn.backends import cpu


def check_both_ways(
    monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[], list[Tensor | None]]
) -> None:
    """Run a call by each way: the first calls ``cpu.name`` once, the other has the same bits."""
    calls = []
    plain = getattr(cpu, name)

    def counted(*args: Any) -> Any:
        calls.append(args)
        return plain(*args)

    monkeypatch.setattr(cpu, name, counted)
    short = run()
    assert len(calls) == 1
    monkeypatch.setattr(fast_path, "BACKENDS", ("",))
    with fastattn.use_backend("cpu"):
        general = run()
    assert len(calls) == 1
    for a, b in zip(short, general, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
