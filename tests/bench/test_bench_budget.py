"""The time budget of a run: which cells get which part of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_results import bench, cell_of

from fastattn.bench import results, runner
from fastattn.bench.cells import Cell
from fastattn.bench.display import Progress


@pytest.mark.complete
def test_the_time_budget_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    bench(
        *("run", "--shapes", "B=1,H=1,L=8:40:+1,D=8", "--threads", "1", "--rounds", "1000"),
        *("--providers", "torch", "--time-budget", "4", "--json", str(path), "--quiet"),
    )
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 33  # each cell has its line, measured or not
    statuses = [row["status"] for row in rows]
    assert statuses == ["ok"] * statuses.count("ok") + ["SKIPPED"] * statuses.count("SKIPPED")
    assert statuses[0] == "ok"


def test_a_budget_that_runs_out_cuts_the_last_cells_and_not_the_rounds_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sample takes half a second, so that 20 seconds are two cells of 9 rounds and a bit."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def sample(
        self: runner.Runner, name: str, outcome: results.Outcome, turn: results.Round
    ) -> None:
        clock.now += 0.5
        turn.ms[name], turn.probes[name], turn.pushed[name] = 500.0, [30.0, 30.0], 0.0

    def prepare(self: runner.Runner, name: str, *_: object) -> None:
        self.sample_seconds[name] = 0.5

    def start(self: runner.Runner) -> None:
        self.workers = dict.fromkeys(self.settings.providers, SimpleNamespace(stop=lambda: None))

    monkeypatch.setattr(runner, "time", clock)
    for name, function in (
        ("_start", start),
        ("_prepare", prepare),
        ("_time", sample),
        ("_oracle_for", lambda *_: None),
        ("_measure_peaks", lambda *_: None),
        ("_peak", lambda *_: (1.0, 1.0)),
    ):
        monkeypatch.setattr(runner.Runner, name, function)
    available = runner.Runner._availability

    def availability(self: runner.Runner, name: str, cell: Cell, seconds: float) -> results.Outcome:
        return results.Outcome() if seconds > 0 else available(self, name, cell, seconds)

    monkeypatch.setattr(runner.Runner, "_availability", availability)
    cells = [cell_of("sdpa", f"H=1,L={length},D=8") for length in (4, 5, 6, 7, 8)]
    settings = runner.Settings(cells, threads=1, time_budget=20.0)
    result = runner.Runner(settings, Progress(None)).run(results.Journal(None))
    assert [len(found.rounds) for found in result.cells] == [9, 9, 3, 0, 0]
    assert [found.outcomes["torch"].status for found in result.cells] == [
        *["ok"] * 3,
        *["SKIPPED"] * 2,
    ]
