"""Whole runs of the benchmark: what they write, what they survive, and which cells get the time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_results import bench, cell_of

from fastattn.bench import cli, results, runner, summary


def test_an_exhausted_budget_drops_the_last_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sample takes half a second, so that 20 seconds are two cells of 9 rounds and a bit."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def time() -> dict[str, Any]:
        clock.now += 0.5
        return {"ms": 500.0, "probes": [30.0, 30.0], "pushed": 0.0}

    replies: dict[str, Callable[..., Any]] = {
        "open": lambda **_: {},
        "peak": lambda **_: (results.Peak(1.0, "measured"), 1.0),
        "why_not": lambda **_: [],
        "prepare": lambda **_: {"outputs": b"", "inner": 1, "peak_bytes": 0},
        "time": time,
    }
    worker = SimpleNamespace(
        ask=lambda timeout, do, **request: replies[do](**request), stop=lambda: None
    )
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "WorkerProcess", lambda *_: worker)
    monkeypatch.setattr(runner, "torch", SimpleNamespace(set_num_threads=id, load=id))
    right = SimpleNamespace(check=lambda _: results.Outcome())
    monkeypatch.setattr(runner, "Oracle", lambda *_: right)
    cells = [cell_of("sdpa", f"H=1,L={length},D=8") for length in (4, 5, 6, 7, 8)]
    result = runner.Runner(runner.Settings(cells, threads=1, time_budget=20.0)).run()
    assert [len(found.rounds) for found in result.cells] == [9, 9, 3, 0, 0]
    assert [found.outcomes["torch"].status for found in result.cells] == [
        *["ok"] * 3,
        *["SKIPPED"] * 2,
    ]


TINY_RUN = ("run", "--threads", "1", "--rounds", "1", "--providers", "torch", "--quiet")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of providers that do what providers should not."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "__init__.py").touch()
    common = """
        import os, time
        from fastattn.bench.providers import Torch
        ABOUT, prepare, versions, why_not = "", Torch().prepare, Torch().versions, Torch().why_not
        right = prepare
    """
    faults = {
        "wrong": (
            "prepare(cell, inputs)",
            "return lambda: [x * 1.01 for x in right(cell, inputs)()]",
        ),
        "crashing": ("prepare(cell, inputs)", "print('going down'); os.abort()"),
        "hanging": ("prepare(cell, inputs)", "time.sleep(600)"),
        "raising": ("prepare(cell, inputs)", "raise RuntimeError('out of luck')"),
        "missing": ("versions()", "raise ImportError('no wheel for this machine')"),
        "choosy": ("why_not(cell)", "return ['not today', 'nor tomorrow']"),
    }
    for name, (function, body) in faults.items():
        fault = f"def {function}:\n    {body}\n"
        (folder / f"{name}.py").write_text(textwrap.dedent(common) + fault)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


@pytest.mark.complete
def test_bad_providers_are_named_and_the_good_survive(
    fakes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        "torch": ("ok", ""),
        "fakes.wrong": ("WRONG", "out [1, 2, 16, 8]: max error"),
        "fakes.crashing": ("CRASHED", "signal SIGABRT during 'prepare'"),
        "fakes.hanging": ("HUNG", "no answer to 'prepare' within 12 s"),
        "fakes.raising": ("ERROR", "RuntimeError: out of luck"),
        "fakes.missing": ("UNAVAILABLE", "ImportError: no wheel for this machine"),
        "fakes.choosy": ("UNAVAILABLE", "not today; nor tomorrow"),
    }
    out = tmp_path / "out"
    code = bench(
        *("run", "--shapes", "B=1,H=2,L=16,D=8", "--threads", "1", "--rounds", "2", "--quiet"),
        *("--providers", ",".join(expected), "--timeout", "12", "--out", str(out)),
    )
    assert code == cli.FAULTS
    for row in json.loads((out / "results.json").read_text())["rows"]:
        status, reason = expected.pop(row["provider"])
        assert row["status"] == status, row
        assert reason in row["reason"]
        assert (row["ms"] is not None) == (status == "ok")
    assert not expected
    printed = capsys.readouterr().out
    assert "fakes.wrong WRONG in 1 cell." in printed


@pytest.mark.complete
def test_a_cell_too_large_for_memory_is_an_error_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    shapes = ("--shapes", "H=1,L=1000000000", "--shapes", "H=1,L=4")
    assert bench(*TINY_RUN, *shapes, "--json", str(path)) == cli.FAULTS
    too_large, small = json.loads(path.read_text())["rows"]
    assert too_large["status"] == "ERROR"
    assert "the fp64 reference cannot be computed: " in too_large["reason"]
    assert small["ms"] > 0


@pytest.mark.complete
def test_a_run_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = bench(
        *("run", "--shapes", "B=1,H=2,L=16,D=8 pass=fwd,fwd+bwd", "--quiet"),
        *("--shapes", "decode H=4,Hkv=2,Lk=16,D=8"),
        *("--providers", "torch,fastattn@reference", "--threads", "1", "--rounds", "3"),
        *("--out", str(tmp_path / "{processor}")),
    )
    assert code == cli.OK
    printed = capsys.readouterr().out
    assert bench("env") == cli.OK
    tmp_path /= json.loads(capsys.readouterr().out)["processor"]
    assert (tmp_path / "results.md").read_text() in printed
    assert " of 3 cells faster, " in printed

    document = json.loads((tmp_path / "results.json").read_text())
    assert document["format"] == results.FORMAT
    assert document["environment"]["threads"] == 1
    assert document["ended"] == "complete"
    turn = document["cells"][0]["rounds"][0]
    assert turn["probes"].keys() == turn["pushed"].keys() == turn["ms"].keys()
    assert all(1 < probe < 1e6 for probes in turn["probes"].values() for probe in probes)
    assert {len(probes) for probes in turn["probes"].values()} == {2}
    assert all(len(cell["rounds"]) >= 3 for cell in document["cells"])

    loaded = results.load(tmp_path / "results.json")
    for row, saved in zip(summary.summarise(loaded), document["rows"], strict=True):
        numbers = {name: x for name, x in saved.items() if isinstance(x, float)}
        # The file's rows were computed from unrounded samples.
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-3)
        assert row["verdict"] == saved["verdict"]

    assert [row["provider"] for row in document["rows"]] == ["torch", "fastattn@reference"] * 3
    assert all(row["ms"] > 0 for row in document["rows"])


@pytest.mark.complete
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "fastattn", "bench", "run", "--providers", "torch"),
        *("--shapes", "B=1,H=1,L=8:200:+1,D=8", "--threads", "1", "--rounds", "3"),
        *("--time-budget", "600", "--out", str(tmp_path), "--quiet"),
    ]

    def heed_ctrl_c() -> None:  # a shell ignores it for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        path = tmp_path / "results.json"
        end = time.monotonic() + 120
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    assert "The run was interrupted" in printed
    kept = results.load(path)
    assert kept.ended == "interrupted"
    assert kept.cells[0].rounds


@pytest.mark.complete
def test_a_full_disk_is_named_and_the_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.md").symlink_to("/dev/full")
    code = bench(*TINY_RUN, "--shapes", "H=1,L=4", "--out", str(tmp_path), "--json", "/dev/full")
    assert code == cli.UNWRITTEN
    printed, complaints = capsys.readouterr()
    assert "1 results were compared" in printed
    assert (tmp_path / "results.json").exists()
    for name in ("results.md", "/dev/full"):
        assert f"{name}: No space left on device" in complaints


@pytest.mark.slow
def test_a_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy this machine is, the first run counts; the last one is measured again.
    monkeypatch.setattr("fastattn.bench.results.QUIET", 0.0)
    monkeypatch.setattr("fastattn.bench.results.QUIET_SHARE", 0.0)
    monkeypatch.setattr("fastattn.bench.machine._commit", lambda: None)  # somebody edits
    run = (*TINY_RUN, "--out", str(tmp_path))
    assert bench(*run, "--shapes", "H=1,L=4") == cli.OK
    first = results.load(tmp_path / "results.json")
    assert bench(*run, "--shapes", "H=1,L=4|5", "--resume") == cli.OK
    both = results.load(tmp_path / "results.json")
    assert [cell.cell["Lq"] for cell in both.cells] == [4, 5]
    assert both.cells[0].rounds == first.cells[0].rounds
    assert bench(*run, "--shapes", "H=1,L=4", "--resume", "--seed", "7") == cli.USAGE
    assert "another seed: 0 and 7" in capsys.readouterr().err
    assert bench(*TINY_RUN, "--resume") == cli.USAGE
    assert "--resume: give the --out DIR" in capsys.readouterr().err
    assert len(results.load(tmp_path / "results.json").cells) == 2  # a refusal destroys nothing
    assert (tmp_path / "results.md").read_text().startswith("| cell")
    monkeypatch.setattr("fastattn.bench.results.QUIET", 2.0)  # no machine is so quiet
    assert bench(*run, "--shapes", "H=1,L=4|5", "--resume") == cli.OK
    again = results.load(tmp_path / "results.json")
    assert again.cells[0].rounds != both.cells[0].rounds
