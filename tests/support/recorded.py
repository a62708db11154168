"""A plugin of pytest that keeps each result at once, so that a run that was killed can go on.

    python -m pytest -p recorded --record FILE [--with PART,PART] ...

FILE gets JSON objects, one a line. A test that has an end is not run again. Whoever started the run
says what became of one without an end (`settle`): it crashed, or was interrupted. A test that was
interrupted is run again, once: it may have been what hung. ``--with`` takes the tests whose
parameters, the parts of the name in brackets, are all among them. After an error of CUDA nothing
runs in the same process, so the run ends with the code BROKEN, and can go on in the next process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BROKEN = 77
UNUSABLE = re.compile(r"CUDA error|CUDA driver error|device-side assert|illegal memory access")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="the file of results")
    parser.addoption("--with", default="", dest="parts", help="parameters, separated by commas")
    parser.addoption("--test-limit", type=float, default=180.0, help="seconds of one test")


def _read(path: Path) -> list[dict[str, Any]]:
    """All that was written; the last line of the file may have been cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The last that is known of each test."""
    return {one["test"]: one for one in _read(path)}


def settle(path: Path, outcome: str, reason: str) -> list[str]:
    """Gives the tests without an end this outcome, and returns their names."""
    open_ends = [test for test, one in results(path).items() if one["outcome"] == "begun"]
    for test in open_ends:
        _write(path, test, outcome, reason=reason)
    return open_ends


def _done(path: Path) -> set[str]:
    """The tests that are not run again."""
    times = Counter(one["test"] for one in _read(path) if one["outcome"] == "interrupted")
    last = results(path).items()
    return {test for test, one in last if one["outcome"] != "interrupted" or times[test] > 1}


def _write(path: Path, test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
    line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def parts_of(name: str) -> set[str]:
    """The parameters in the name of a test, as far as hyphens divide them."""
    return set(re.sub(r"^[^\[]*\[?|\]$", "", name).split("-"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {part for part in config.getoption("parts").split(",") if part}
    record = config.getoption("record")
    done = _done(record) if record else set()
    kept, left = [], []
    for item in items:
        is_next = wanted <= parts_of(item.name) and item.nodeid not in done
        (kept if is_next else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = kept


class Recorder:
    def __init__(self, path: Path, limit: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.limit = path, limit

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _write(self.path, nodeid, "begun")
        with contextlib.suppress(RuntimeError):  # stderr may have no file
            faulthandler.dump_traceback_later(self.limit, exit=True, file=sys.__stderr__)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        reason = ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(getattr(crash, "message", report.longrepr))
        elif isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        _write(self.path, report.nodeid, report.outcome, report.duration, reason[:400])
        if report.outcome == "failed" and UNUSABLE.search(reason):
            pytest.exit("CUDA can run nothing more in this process", returncode=BROKEN)


def pytest_configure(config: pytest.Config) -> None:
    if record := config.getoption("record"):
        config.pluginmanager.register(Recorder(record, config.getoption("test_limit")))
