"""The process of one provider: JSON lines in, JSON lines out.

    {"do": "open", "provider", "threads"}                  -> {"about", "versions"}
    {"do": "why_not", "cell"}                              -> {"reasons"}
    {"do": "prepare", "cell", "seed", "save", "sample"}    -> {"first_ms", "inner", "peak_bytes"}
    {"do": "time"}                                         -> {"ms"} of one call, over `inner` calls
    {"do": "peak", "kind", "threads", "seconds"}           -> {"rate", "method"}

`prepare` leaves the outputs in the file `save`. Every reply has "ok"; with false it has "error".
What a library prints goes to stderr, never between the replies.
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

from fastattn.bench import peaks
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import make_inputs, output_names
from fastattn.bench.memory import peak_extra_bytes
from fastattn.bench.providers import Provider, load

Request = dict[str, Any]
MAX_INNER = 10_000
NEEDS_WARMING = 0.2  # seconds; a longer call refills the caches in a small part of its time

# Batch and lengths of the tiny cell that loads the code; widths decide which code it is.
_TINY = {"B": 1, "S": 1, "L": 16, "Lq": 16, "Lk": 16, "N": 16}


class Worker:
    """Serves one provider. `time` repeats the call that the last `prepare` made."""

    def __init__(self) -> None:
        self.provider: Provider | None = None
        self.call: Callable[[], Any] | None = None
        self.inner = 1
        self.seconds = 0.0  # of one call, roughly
        self.awake: set[Cell] = set()

    def open(self, request: Request) -> Request:
        torch.set_num_threads(request["threads"])
        self.provider = load(request["provider"])
        return {"about": self.provider.ABOUT, "versions": self.provider.versions()}

    def why_not(self, request: Request) -> Request:
        assert self.provider is not None
        return {"reasons": self.provider.why_not(Cell.from_json(request["cell"]))}

    def prepare(self, request: Request) -> Request:
        assert self.provider is not None
        cell = Cell.from_json(request["cell"])
        self.call = None  # frees the previous cell before this one is measured
        self._wake(cell)
        call = self.provider.prepare(cell, make_inputs(cell, request["seed"]))
        outputs, peak_bytes = peak_extra_bytes(call)
        save_outputs(cell, outputs, Path(request["save"]))
        del outputs
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self.call = call
        self.seconds = seconds
        self.inner = max(1, min(MAX_INNER, math.ceil(request["sample"] / max(seconds, 1e-9))))
        return {"first_ms": seconds * 1e3, "inner": self.inner, "peak_bytes": peak_bytes}

    def _wake(self, cell: Cell) -> None:
        """Runs a tiny cell of the same kind once: loading code is no cost of the shape's."""
        sizes = {key: min(size, _TINY.get(key, size)) for key, size in cell.sizes.items()}
        tiny = dataclasses.replace(cell, sizes=sizes)
        if (kind := dataclasses.replace(tiny, preset="", label="")) not in self.awake:
            assert self.provider is not None
            with contextlib.suppress(Exception):  # the cell itself will say what is wrong
                self.provider.prepare(tiny, make_inputs(tiny, 0))()
            self.awake.add(kind)

    def time(self, request: Request) -> Request:
        call, inner = self.call, self.inner
        assert call is not None
        gc.collect()
        gc.disable()
        if self.seconds < NEEDS_WARMING:
            call()  # wakes the threads, brings the inputs back into the caches: times are warm
        start = time.perf_counter()
        for _ in range(inner):
            call()
        seconds = time.perf_counter() - start
        gc.enable()
        return {"ms": seconds / inner * 1e3}

    def peak(self, request: Request) -> Request:
        torch.set_num_threads(request["threads"])
        rate, method = peaks.measure_peak(request["kind"], request["threads"], request["seconds"])
        return {"rate": rate, "method": method}


def save_outputs(cell: Cell, outputs: Any, path: Path) -> None:
    """Writes what a provider returned for the comparison in the parent."""
    names = output_names(cell)
    if len(outputs) != len(names):
        raise ValueError(f"returned {len(outputs)} arrays, expected {len(names)}: {names}")
    tensors: dict[str, Tensor] = {
        name: torch.as_tensor(array).detach().clone()
        for name, array in zip(names, outputs, strict=True)
    }
    torch.save(tensors, path)


def _end_with_parent() -> None:
    """Asks Linux to end this process when its parent dies, even amid an endless call."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> int:
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library that prints must not break the protocol
    worker = Worker()
    actions: dict[str, Callable[[Request], Request]] = {
        name: getattr(worker, name) for name in ("open", "why_not", "prepare", "time", "peak")
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, **actions[request["do"]](request)}
        except Exception as error:  # whatever a provider raises is its row's reason, not our end
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
