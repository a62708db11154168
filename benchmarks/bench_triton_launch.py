"""The time of Python to launch a compiled Triton kernel; for pytest-benchmark.

OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_triton_launch.py

It needs no GPU: the driver does nothing, and tensors have no memory. The time includes everything
before the driver for the first kernel of a call, by our launcher and by that of Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_aot  # noqa: E402

from fastattn.backends.triton import _launch  # noqa: E402

CHIP = "sm_90"
HALF = torch.bfloat16
CALLS: dict[str, Callable[[], Any]] = {
    "attention": triton_aot.attention(HALF, 64),
    "attention, backward": triton_aot.attention(HALF, 64, backward=True),
    "packed sequences": triton_aot.packed(HALF, 64),
    "decoding": triton_aot.decode(HALF, 64),
    "memory hops": triton_aot.hops(HALF, 64),
    "sinusoidal encoding": triton_aot.sinusoidal(HALF),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    triton.runtime.driver.set_active(triton_aot.Driver(triton_aot.CHIPS[CHIP].target))
    monkeypatch.setattr(_launch, "architecture_of", lambda device: CHIP)


@pytest.mark.parametrize("launcher", ["ours", "Triton's own"])
@pytest.mark.parametrize("name", CALLS)
def bench_triton_launch(benchmark: Any, driver: None, name: str, launcher: str) -> None:
    one = triton_aot.recorded(CALLS[name], CHIP)[0]
    benchmark.group = name
    if launcher == "ours":
        benchmark(_launch.launch, one.kernel, one.chosen, 1, torch.device("meta"), **one.arguments)
    else:
        benchmark(one.kernel[(1,)], **one.arguments, **_launch.options_of(one.chosen))
