"""What it costs in Python to launch a Triton kernel that was compiled before; no GPU is needed.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bench_triton_launch.py

The driver does nothing, and tensors have no memory: what is measured is all that comes before the
driver, from the arguments of the first kernel of a call on; beside it the same by Triton's own
launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from fastattn.backends.triton import _launch
from fastattn.testing import triton_aot

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


def microseconds(candidates: dict[str, Callable[[], Any]], rounds: int = 300) -> dict[str, float]:
    """Medians, one after the other in each round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            began = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def candidates(one: _launch.Recording) -> dict[str, Callable[[], Any]]:
    def ours() -> None:
        _launch.launch(one.kernel, one.chosen, 1, torch.device("meta"), **one.arguments)

    def tritons() -> None:
        one.kernel[(1,)](**one.arguments, **_launch.options_of(one.chosen))

    return {"launch": ours, "Triton's own": tritons}


def main() -> None:
    triton.runtime.driver.set_active(triton_aot.Driver(triton_aot.CHIPS[CHIP].target))
    _launch.architecture_of = lambda device: CHIP
    print(f"Triton {triton.__version__}, torch {torch.__version__}; microseconds, medians")
    for name, call in CALLS.items():
        recorded = triton_aot.recorded(call, CHIP)
        found = microseconds(candidates(recorded[0]))
        told = ", ".join(f"{what} {us:.1f}" for what, us in found.items())
        print(f"{name}: {told}")


if __name__ == "__main__":
    main()
