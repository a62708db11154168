"""The rehearsal of `make gpu-day` in seconds: `python tests/gpu/day_skeleton.py --out DIR`.

All commands of all steps run as they stand, but each in a fork of this process, which has imported
everything; of each step's tests only the last one runs, and the benchmarks time nothing.
"""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

import day
import pytest

from fastattn import dispatch
from fastattn.bench import runner
from fastattn.bench.results import CellResult, Outcome, Peak, Round
from fastattn.testing import CASES
from fastattn.testing.proofs import PROOFS
from fastattn.testing.verdict import fresh_memory_is_nan


class Forked:
    """What the day needs of `subprocess.Popen`, for a command of Python."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str],
        stderr: IO[str],
        **others: Any,
    ) -> None:
        assert command[0] == sys.executable
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                os.environ.update(env)
                os._exit(run(command[1:]))
            except BaseException:  # must not go on as a second parent
                traceback.print_exc()
                os._exit(1)

    def wait(self, timeout: float | None = None) -> int:
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def poll(self) -> int | None:
        return self.code


def run(arguments: Sequence[str]) -> int:
    """Python with these arguments."""
    is_module = arguments[0] == "-m"
    name, *sys.argv[1:] = arguments[is_module:]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = name
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def only_one_test() -> types.ModuleType:
    """A plugin that keeps the last test that is not skipped."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        marks = [(item, item.get_closest_marker("skipif")) for item in items]
        items[:] = [item for item, mark in marks if mark is None or not mark.args[0]][-1:]

    plugin = types.ModuleType("only_one_test")
    plugin.__dict__["pytest_collection_modifyitems"] = pytest_collection_modifyitems
    return plugin


def keep_few_cases() -> None:
    """Collecting all of them takes seconds, in each process."""
    words = day.FEW_CASES.split(" or ")

    def few(cases: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(case for case in cases if any(word in case.name for word in words))

    for proof in PROOFS.values():
        object.__setattr__(proof, "cases", few(proof.cases))
    CASES.update({op: few(cases) for op, cases in CASES.items()})


class Untimed(runner.Runner):
    """Starts no process: each provider takes a millisecond."""

    def _start(self) -> None:
        self.result.providers = {name: {"status": "ok"} for name in self.settings.providers}
        self.journal.write("header", self.result.header())

    def _measure(self, found: CellResult, seconds: float) -> None:
        names = self.settings.providers
        found.flops, found.outcomes = 1, dict.fromkeys(names, Outcome())
        found.rounds = [Round((1.0, 1.0), dict.fromkeys(names, 1.0))]

    def _peak(self, kind: str, *_: Any) -> tuple[float, float]:
        self.result.peaks.setdefault(kind, Peak(1.0, "untimed", []))
        return 1.0, 1.0


if __name__ == "__main__":
    for name in dispatch.BACKENDS:
        dispatch.load(name)
    with fresh_memory_is_nan():  # imports much of PyTorch
        keep_few_cases()
    sys.modules["only_one_test"] = only_one_test()
    os.environ["PYTEST_ADDOPTS"] = "-p only_one_test"
    names = {"Popen": Forked, "TimeoutExpired": subprocess.TimeoutExpired}
    day.__dict__["subprocess"] = types.SimpleNamespace(**names)
    runner.Runner = Untimed  # type: ignore[misc]
    gc.freeze()  # else each fork goes through all that was imported
    sys.exit(day.main(["--rehearse", *sys.argv[1:]]))
