"""The processes of providers, from the parent's side: start, ask with a time limit, stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

START_SECONDS = 120.0
ISA_VARIABLE = "FASTATTN_CPU_ISA"


class ProviderError(RuntimeError):
    """A request failed; `status` is that of the result: ERROR, CRASHED or HUNG."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class WorkerProcess:
    """One worker process; `isa` forces an instruction set of the native core."""

    def __init__(self, threads: int, cpus: Sequence[int], isa: str = "") -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fastattn.bench.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=os.environ | thread_variables(threads) | ({ISA_VARIABLE: isa} if isa else {}),
                # Ctrl-C reaches only the parent, which then ends the workers.
                start_new_session=True,
            )
        if cpus and hasattr(os, "sched_setaffinity"):
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
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))[:threads]
