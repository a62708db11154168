"""The parent's side of a worker process: start, send requests with a time limit, stop."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

START_SECONDS = 120.0
ISA_VARIABLE = "FASTATTN_CPU_ISA"


class ProviderError(RuntimeError):
    """A request failed; `status` is that of the result: ERROR, CRASHED or HUNG."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class WorkerProcess:
    """One worker process and its pipes; `isa` forces an instruction set of the native core."""

    def __init__(self, threads: int, cpus: Sequence[int], isa: str = "") -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastattn.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | thread_variables(threads) | ({ISA_VARIABLE: isa} if isa else {}),
            # A separate process group: Ctrl-C reaches only the parent, which then ends the workers.
            start_new_session=True,
        )
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cpus)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._replies.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)

    def ask(self, timeout: float, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request, returns the reply; raises ProviderError on an error, crash or hang."""
        try:
            self._requests.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self._requests.flush()
        except OSError:
            raise self._crashed(do) from None
        reply: dict[str, Any] = json.loads(self._read_line(do, timeout))
        if not reply.pop("ok"):
            raise ProviderError("ERROR", reply["error"])
        return reply

    def stop(self) -> None:
        """Ends the process and its children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        with contextlib.suppress(OSError):  # unwritten data has no reader any more
            self._requests.close()
        self._replies.close()
        self._errors.close()

    def _read_line(self, do: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0:
                self.stop()
                raise ProviderError(
                    "HUNG", f"no answer to {do!r} within {timeout:.0f} s (--timeout)"
                )
            if self._selector.select(left):
                chunk = self._replies.read()
                if not chunk:
                    raise self._crashed(do)
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _crashed(self, do: str) -> ProviderError:
        try:
            code = self._process.wait(timeout=5)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        message = self._last_line()
        self.stop()
        return ProviderError(
            "CRASHED", f"{how} during {do!r}" + (f": {message}" if message else "")
        )

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables that give every runtime the same number of threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TBB_NUM_THREADS")
    return {name: str(threads) for name in names} | {"MKL_DYNAMIC": "FALSE"}


def usable_cpus(threads: int) -> list[int]:
    """The processors that workers are pinned to: the first `threads` that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))[:threads]
