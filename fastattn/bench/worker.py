"""The worker process of one provider: reads requests and writes replies as JSON lines.

    {"do": "open", "provider", "threads"}                  -> {"about", "versions"}
    {"do": "why_not", "cell"}                              -> {"reasons"}
    {"do": "prepare", "cell", "seed", "save", "sample", "cold"}
                                                           -> {"first_ms", "inner", "peak_bytes"}
    {"do": "time"}                                         -> {"ms", "joules", "attention"} of a
                                                              call (attention: share of its time),
                                                              {"probes", "pushed"} of a sample
    {"do": "peak", "kind", "threads", "seconds", "device"} -> {"rate", "method", "share", "unit"}

`prepare` writes the outputs to the file `save`. Every reply has "ok"; if it is false, also "error".
Output of libraries goes to stderr, never between the replies.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import ops, peaks
from fastattn.bench.caches import Sweeper
from fastattn.bench.cells import Cell
from fastattn.bench.energy import joules
from fastattn.bench.inputs import make_inputs, output_names
from fastattn.bench.memory import peak_extra_bytes
from fastattn.bench.probe import Probe, times_pushed
from fastattn.bench.providers import Provider, load
from fastattn.bench.stopwatch import Stopwatch

Request = dict[str, Any]
MAX_INNER = 10_000
MAX_INNER_COLD = 10  # flushing the caches takes longer than most calls
SETTLE_SECONDS = 0.25
NEEDS_WARMING = 0.2  # seconds; longer calls spend only a small part of it on refilling caches
# Seconds of calls, or of probes if these take long, before a sample. After waiting for its turn, a
# processor takes milliseconds to reach its speed: on an EPYC of Zen 5 the first calls of 2 ms take
# 1.5, 1.3 and 1.1 times as long.
WARMING = 0.01


class Worker:
    """Serves one provider. `time` repeats the call that the last `prepare` returned."""

    def __init__(self) -> None:
        self.provider: Provider | None = None
        self.call: Callable[[], Any] | None = None
        self.inner = 1
        self.seconds = 0.0  # of one call, estimated
        self.loaded: set[Cell] = set()
        self.device, self.cold = "cpu", False
        self.stopwatch: Stopwatch | None = None
        self.probe: Callable[[], float] = float
        self.sweeper = Sweeper()

    def open(self, request: Request) -> Request:
        torch.set_num_threads(request["threads"])
        _keep_freed_memory()
        self.provider = load(request["provider"])
        shared = getattr(self.provider, "THREADS_OF_TORCH", True)
        self.probe = Probe(request["threads"] if shared else 1)
        self.probe()  # loads the code
        return {"about": self.provider.ABOUT, "versions": self.provider.versions()}

    def why_not(self, request: Request) -> Request:
        assert self.provider is not None
        return {"reasons": self.provider.why_not(Cell.from_json(request["cell"]))}

    def prepare(self, request: Request) -> Request:
        assert self.provider is not None
        cell = Cell.from_json(request["cell"])
        self.call = None  # frees the previous cell before this one is measured
        self._load_code(cell)
        call = self.provider.prepare(cell, _on_device(cell, request["seed"]))
        outputs, peak_bytes = peak_extra_bytes(call, cell.device)
        save_outputs(cell, outputs, Path(request["save"]))
        del outputs
        self.device, self.cold = cell.device, request["cold"]
        self.stopwatch = ops.get(cell.op).stopwatch
        seconds = self._seconds(call, 1)
        self.call = call
        self.seconds = seconds
        most = MAX_INNER_COLD if self.cold else MAX_INNER
        self.inner = max(1, min(most, math.ceil(request["sample"] / max(seconds, 1e-9))))
        return {"first_ms": seconds * 1e3, "inner": self.inner, "peak_bytes": peak_bytes}

    def _load_code(self, cell: Cell) -> None:
        """Runs a tiny cell of the same kind once, so that no cell includes the loading of code."""
        ops.get(cell.op).require()
        least = ops.get(cell.op).TINY
        sizes = {key: min(size, least.get(key, size)) for key, size in cell.sizes.items()}
        tiny = dataclasses.replace(cell, sizes=sizes)
        if (kind := dataclasses.replace(tiny, preset="", label="")) not in self.loaded:
            assert self.provider is not None
            with contextlib.suppress(Exception):  # the cell itself reports the error
                self.provider.prepare(tiny, _on_device(tiny, 0))()
            self.loaded.add(kind)

    def time(self, request: Request) -> Request:
        call, inner = self.call, self.inner
        assert call is not None
        gc.collect()
        gc.disable()
        # Wakes the threads, and loads the inputs of a short call into the caches.
        warm = call if self.seconds < NEEDS_WARMING else self.probe
        end = time.perf_counter() + WARMING
        warm()
        while time.perf_counter() < end:
            warm()
        lost, began = times_pushed(), time.perf_counter()
        probes = [self.probe()] if self.device == "cpu" else []
        watched, before = self._watched(), joules()
        seconds = self._seconds_cold(call, inner) if self.cold else self._seconds(call, inner)
        watched, after = self._watched() - watched, joules()
        probes += [self.probe()] if self.device == "cpu" else []
        pushed = (times_pushed() - lost) / (time.perf_counter() - began)
        gc.enable()
        used = None if before is None or after is None or self.cold else (after - before) / inner
        _settle()
        return {
            "ms": seconds / inner * 1e3,
            "joules": used,
            "attention": watched / seconds or None,
            "probes": probes,
            "pushed": pushed,
        }

    def _watched(self) -> float:
        return 0.0 if self.stopwatch is None else self.stopwatch.seconds

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        peaks.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        peaks.synchronize(self.device)
        return time.perf_counter() - start

    def _seconds_cold(self, call: Callable[[], Any], count: int) -> float:
        """The same, but flushes the caches before each call, outside the timing."""
        total = 0.0
        for _ in range(count):
            self.sweeper.sweep(self.device)
            total += self._seconds(call, 1)
        return total

    def peak(self, request: Request) -> Request:
        torch.set_num_threads(request["threads"])
        found = peaks.measure_peak(
            request["kind"], request["threads"], request["seconds"], request["device"]
        )
        return found._asdict()


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory, as in a process that has run for a while.

    glibc returns freed blocks above a threshold to the system, and the next call pays the page
    faults. The threshold grows to the size of the largest freed block, up to 32 MiB.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _settle() -> None:
    """Waits until this process is idle.

    The threads of onnxruntime spin for tens of milliseconds after a call and would disturb the
    provider that is timed next.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.002)
        if time.process_time() - cpu < 0.2 * (time.perf_counter() - wall):
            return


def _on_device(cell: Cell, seed: int) -> dict[str, Tensor]:
    return {name: x.to(cell.device) for name, x in make_inputs(cell, seed).items()}


def save_outputs(cell: Cell, outputs: Any, path: Path) -> None:
    """Writes the outputs of a provider, which the parent compares."""
    names = output_names(cell)
    if len(outputs) != len(names):
        raise ValueError(f"returned {len(outputs)} arrays, expected {len(names)}: {names}")
    tensors: dict[str, Tensor] = {
        name: torch.as_tensor(array).detach().cpu().clone()
        for name, array in zip(names, outputs, strict=True)
    }
    torch.save(tensors, path)


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, even during a call that hangs."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> int:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library must not break the protocol
    worker = Worker()
    actions: dict[str, Callable[[Request], Request]] = {
        name: getattr(worker, name) for name in ("open", "why_not", "prepare", "time", "peak")
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, **actions[request["do"]](request)}
        except Exception as error:  # reported in the provider's row; the run continues
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
