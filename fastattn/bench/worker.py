"""The process of a provider, from both sides.

The parent starts it, sends requests with a time limit, and stops it. A request is the name of a
method of :class:`Worker` and its keyword arguments, a reply (True, its result) or (False, its
error). The output of libraries goes to a file of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fastattn import dispatch, scaled_dot_product_attention, use_backend
from fastattn.bench import machine, ops
from fastattn.bench.cells import Cell, make_inputs, output_names
from fastattn.bench.ops._base import Stopwatch
from fastattn.bench.providers import load
from fastattn.dispatch import PRIORITY

START_SECONDS = 120.0


class ProviderError(RuntimeError):
    """A request failed; `status` is the status of the outcome: ERROR, CRASHED or HUNG."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class WorkerProcess:
    """One worker process; `isa` forces an instruction set of the native core."""

    def __init__(self, threads: int, cpus: Sequence[int], isa: str = "") -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, child_end = multiprocessing.Pipe()
        own = thread_variables(threads) | ({"FASTATTN_CPU_ISA": isa} if isa else {})
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fastattn.bench.worker", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=os.environ | own,
                # Ctrl-C reaches only the parent, which then ends the workers.
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, cpus)

    def ask(self, timeout: float, do: str, **request: Any) -> Any:
        """Sends a request, returns the reply; raises ProviderError on an error, crash or hang."""
        try:
            self._connection.send((do, request))
            if not self._connection.poll(timeout):
                self.stop()
                reason = f"no answer to {do!r} within {timeout:.0f} s (--timeout)"
                raise ProviderError("HUNG", reason)
            right, reply = self._connection.recv()
        except (OSError, EOFError):
            raise self._crashed(do) from None
        if not right:
            raise ProviderError("ERROR", reply)
        return reply

    def stop(self) -> None:
        """Ends the process and its children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._printed.close()

    def _crashed(self, do: str) -> ProviderError:
        try:
            code = self._process.wait(timeout=5)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        self.stop()
        message = f": {lines[-1][:200]}" if lines else ""
        return ProviderError("CRASHED", f"{how} during {do!r}{message}")


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables that give every runtime the same number of threads."""
    names = (f"{of}_NUM_THREADS" for of in ("OMP", "MKL", "OPENBLAS", "TBB"))
    return {**dict.fromkeys(names, str(threads)), "MKL_DYNAMIC": "FALSE"}


def usable_cpus(threads: int) -> list[int]:
    """The processors that workers are pinned to: the first `threads` that this process may use."""
    return sorted(os.sched_getaffinity(0))[:threads]


def peak_extra_bytes(call: Callable[[], Any], device: str = "cpu") -> int | None:
    """The largest growth of the process during a call; None if unknown.

    Free pages of the allocator are returned to the system first, because a call that reuses them
    would seem to need no memory. On a GPU, PyTorch's allocator counts.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - held
    process = Path("/proc/self")

    def resident(field: str) -> int:
        lines = (process / "status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)
        (process / "clear_refs").write_text("5")  # resets VmHWM to the current size
        before = resident("VmRSS")
    except OSError:  # a container may forbid it
        return None
    call()
    return max(0, resident("VmHWM") - before)


# Disturbances, measured beside the time of a call. Another process of this machine takes a core for
# milliseconds at a time, which the system counts. A neighbour on the second hyperthread of a core
# slows a short kernel down.


def times_pushed() -> int:
    """How often another process took a core from a thread of this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Probe:
    """Attention on one small head per thread, in the caches.

    In bf16, which runs on AMX's tiles if the processor has them: a neighbour slows them down most.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.rows = torch.ones(threads, 1, 64, 64, dtype=torch.bfloat16)
        backends = PRIORITY["cpu"]
        self.backend = next(x for x in backends if not isinstance(dispatch.load(x), str))

    def __call__(self) -> float:
        """The microseconds of the kernel: the fastest of six calls, without an interrupt."""
        usual, best = torch.get_num_threads(), float("inf")
        if usual != self.threads:  # setting the threads empties the caches of oneDNN
            torch.set_num_threads(self.threads)
        with torch.no_grad(), use_backend(self.backend):  # whatever the provider forces
            for _ in range(6):
                start = time.perf_counter()
                scaled_dot_product_attention(self.rows, self.rows, self.rows)
                best = min(best, time.perf_counter() - start)
        if usual != self.threads:
            torch.set_num_threads(usual)
        return best * 1e6


MAX_INNER = 10_000
NEEDS_WARMING = 0.2  # seconds; longer calls spend little of their time on refilling caches
# Seconds of calls, or of probes if these take long, before a sample. After waiting for its turn, a
# processor takes milliseconds to reach its speed.
WARMING = 0.01


class Worker:
    """Serves one provider. `time` repeats the call that the last `prepare` returned."""

    provider: Any
    call: Callable[[], Any] | None = None
    inner = 1
    seconds = 0.0  # of one call, estimated
    device = "cpu"
    stopwatch = Stopwatch()
    probe: Callable[[], float]

    def open(self, provider: str, threads: int) -> dict[str, Any]:
        """Loads the provider; returns its description and its versions."""
        torch.set_num_threads(threads)
        # Makes glibc keep freed memory, as in a process that has run for a while: it only returns
        # blocks to the system that are larger than the largest block freed before, up to 32 MiB.
        torch.empty(31 << 20, dtype=torch.uint8)
        self.provider = load(provider)
        shared = getattr(self.provider, "THREADS_OF_TORCH", True)
        self.probe = Probe(threads if shared else 1)
        self.probe()  # loads the code
        return {"about": self.provider.ABOUT, "versions": self.provider.versions()}

    def prepare(self, cell: Cell, seed: int, sample: float) -> dict[str, Any]:
        """Prepares a call; returns its outputs, as a file of torch.save, and its memory."""
        self.call = None  # frees the previous cell before this one is measured
        inputs = {name: x.to(cell.device) for name, x in make_inputs(cell, seed).items()}
        call = self.provider.prepare(cell, ops.Inputs(inputs))
        kept, names, saved = [*map(torch.as_tensor, call())], output_names(cell), io.BytesIO()
        if len(kept) != len(names):
            raise ValueError(f"returned {len(kept)} arrays, expected {len(names)}: {names}")
        outputs = {name: x.detach().cpu().clone() for name, x in zip(names, kept, strict=True)}
        torch.save(outputs, saved)
        del kept, outputs
        peak_bytes = peak_extra_bytes(call, cell.device)  # the first call loads the code
        self.device = cell.device
        self.stopwatch = ops.get(cell.op).stopwatch or Stopwatch()
        self.call, self.seconds = call, self._seconds(call, 1)
        count = math.ceil(sample / max(self.seconds, 1e-9))
        self.inner = max(1, min(MAX_INNER, count))
        return {"outputs": saved.getvalue(), "inner": self.inner, "peak_bytes": peak_bytes}

    def time(self) -> dict[str, Any]:
        """Measure a sample, in the fields of `results.Round`."""
        call, inner, watch = self.call, self.inner, self.stopwatch
        assert call is not None
        gc.collect()
        gc.disable()
        # Wakes the threads, and loads the inputs of a short call into the caches.
        warm = call if self.seconds < NEEDS_WARMING else self.probe
        end = time.perf_counter() + WARMING
        warm()
        while time.perf_counter() < end:
            warm()
        lost, began, watched = times_pushed(), time.perf_counter(), watch.seconds
        probes = [self.probe()] if self.device == "cpu" else []
        seconds = self._seconds(call, inner)
        probes += [self.probe()] if self.device == "cpu" else []
        pushed = (times_pushed() - lost) / (time.perf_counter() - began)
        gc.enable()
        _settle()
        sample: dict[str, Any] = {"ms": seconds / inner * 1e3, "pushed": pushed}
        if probes:
            sample["probes"] = probes
        if watch.seconds > watched:
            sample["attention"] = (watch.seconds - watched) / seconds
        return sample

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        """The duration of so many calls."""
        machine.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        machine.synchronize(self.device)
        return time.perf_counter() - start

    def peak(self, kind: str, threads: int, seconds: float, device: str) -> Any:
        torch.set_num_threads(threads)
        return machine.measure_peak(kind, threads, seconds, device)


def _settle() -> None:
    """Waits until this process is idle: the threads of onnxruntime spin after a call."""
    end = time.perf_counter() + 0.25
    while time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.002)
        if time.process_time() - cpu < 0.2 * (time.perf_counter() - wall):
            return


def main() -> None:
    # Linux kills this process when its parent dies, even during a call that hangs.
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    connection, worker = Connection(int(sys.argv[1])), Worker()
    while True:
        try:
            do, request = connection.recv()
        except EOFError:
            return
        try:
            method = worker.provider.why_not if do == "why_not" else getattr(worker, do)
            reply = True, method(**request)
        except Exception as error:  # reported in the provider's row; the run continues
            reply = False, f"{type(error).__name__}: {error}".splitlines()[0]
        connection.send(reply)


if __name__ == "__main__":
    main()
