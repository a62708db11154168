"""`bench breakdown`: the parts of a call, and their budget."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import cell_of
from test_bench_render import load_module

from fastattn import dispatch, evidence
from fastattn.bench import breakdown, cli, results, summary
from fastattn.cli import main

pytestmark = pytest.mark.skipif(isinstance(dispatch.load("cpu"), str), reason="no native core")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "SAMPLE_SECONDS", 1e-4)


@pytest.mark.parametrize(
    ("op", "shape", "passes"),
    [
        ("sdpa", "B=1,H=2,L=4,D=8", "fwd+bwd"),
        *(("memory_hops", "B=2,N=5,D=8,K=2", passes) for passes in ("fwd", "fwd+bwd")),
    ],
)
def test_every_part_is_measured_and_functions_are_restored(
    op: str, shape: str, passes: str
) -> None:
    places = [*breakdown._adapters(), *breakdown._natives(), *breakdown._ALLOCATORS]
    before = [getattr(owner, name) for owner, name in places]
    threads, own = torch.get_num_threads(), "new_empty" in vars(torch.Tensor)
    cell = cell_of(op, shape, passes=passes)
    (found,) = breakdown.measure([cell], threads=threads, rounds=1).cells
    assert [getattr(owner, name) for owner, name in places] == before
    assert ("new_empty" in vars(torch.Tensor)) == own
    assert torch.get_num_threads() == threads
    assert found.outcomes["call"].status == "ok"
    (turn,) = found.rounds
    assert sorted(turn.ms) == sorted(breakdown.PARTS)
    unmeasured = {"allocation", *["floor"] * (passes == "fwd")}  # the core allocates the results
    assert {name for name, ms in turn.ms.items() if ms <= 1e-4} <= unmeasured


def test_emptying_the_arguments_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, timed = breakdown.Stopwatch(), []
    monkeypatch.setattr(breakdown, "_emptied", lambda *x: (timed.append(watch.is_running), x)[1])
    breakdown._timed(torch.neg, watch, emptied=True)(torch.ones(2))
    assert timed == [False]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dispatch.load("cpu")
    right = module.scaled_dot_product_attention  # type: ignore[union-attr]

    @functools.wraps(right)
    def wrong(*tensors: Any, **named: Any) -> Any:
        found = right(*tensors, **named)
        return found + 1 if isinstance(found, torch.Tensor) else (found[0] + 1, *found[1:])

    monkeypatch.setattr(module, "scaled_dot_product_attention", wrong)
    evidence.forget()  # plans keep the functions that they call
    cell = cell_of("sdpa", "B=1,H=2,L=4,D=8")
    (found,) = breakdown.measure([cell], threads=1, rounds=1).cells
    assert found.outcomes["call"].status == "WRONG"
    assert found.rounds == []


def test_the_command_writes_a_result_that_is_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "breakdown.json"
    command = ["bench", "breakdown", "--shapes", "sdpa B=1,H=2,L=4,D=8 pass=fwd+bwd"]
    assert main([*command, "--rounds", "1", "--threads", "1", "--json", str(path)]) == cli.OK
    assert "sdpa B=1,H=2,L=4,D=8 fp32 fwd+bwd" in capsys.readouterr().out
    result = results.load(path)
    assert not any(row["impossible"] for row in summary.summarise(result))
    assert "autograd" in load_module().results_page({"here": {"breakdown": result}})
    assert main([*command, "--rounds", "0"]) == cli.USAGE
