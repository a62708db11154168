"""The time budget of a run: which cells get which part of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from bench_results import cell_of

from fastattn.bench import results, runner


def test_a_budget_that_runs_out_cuts_the_last_cells_and_not_the_rounds_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sample takes half a second, so that 20 seconds are two cells of 9 rounds and a bit."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def time() -> dict[str, Any]:
        clock.now += 0.5
        return {"ms": 500.0, "probes": [30.0, 30.0], "pushed": 0.0, "attention": None}

    replies: dict[str, Callable[..., Any]] = {
        "open": lambda **_: {},
        "peak": lambda **_: (results.Peak(1.0, "measured"), 1.0),
        "why_not": lambda **_: [],
        "prepare": lambda **_: {"outputs": b"", "seconds": 0.5, "inner": 1, "peak_bytes": 0},
        "time": time,
    }
    worker = SimpleNamespace(
        ask=lambda timeout, do, **request: replies[do](**request), stop=lambda: None
    )
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "WorkerProcess", lambda *_: worker)
    monkeypatch.setattr(runner, "torch", SimpleNamespace(set_num_threads=id, load=id))
    right = SimpleNamespace(check=lambda _: results.Outcome())
    monkeypatch.setattr(runner.Runner, "_oracle_for", lambda *_: right)
    cells = [cell_of("sdpa", f"H=1,L={length},D=8") for length in (4, 5, 6, 7, 8)]
    result = runner.Runner(runner.Settings(cells, threads=1, time_budget=20.0)).run()
    assert [len(found.rounds) for found in result.cells] == [9, 9, 3, 0, 0]
    assert [found.outcomes["torch"].status for found in result.cells] == [
        *["ok"] * 3,
        *["SKIPPED"] * 2,
    ]
