"""Runs Python, or a function, in a process of its own, which imports what the tests import."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    timeout: float | None = None,
    status: int | None = 0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run it with the path of this process and what ``environment`` adds to the environment.

    It must end with this status; None: with any.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        check=False,
        cwd=cwd,
        timeout=timeout,
    )
    assert status in (None, done.returncode), done.stdout[-4000:] + done.stderr[-3000:]
    return done


def in_fork(work: Callable[[], bool], timeout: float = 60) -> None:
    """Run ``work`` in a fork of this process, which has none of its threads.

    It must return True.
    """

    def child() -> None:
        os._exit(0 if work() else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0
