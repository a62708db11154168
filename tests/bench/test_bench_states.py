"""Verdicts on a machine that something else uses: which rounds count."""

from __future__ import annotations

import pytest
import torch
from bench_results import TINY

from fastattn import use_backend
from fastattn.bench import stats
from fastattn.bench.gauges import Probe, times_pushed
from fastattn.bench.results import CellResult, Round

TWO = ("torch", "ours")


def a_round(ratio: float, **changed: tuple[str, float, float, float]) -> Round:
    """A round whose samples ran alone; `changed` has a provider, its probes and its count."""
    turn = Round((1.0, 1.0), {"torch": ratio, "ours": 1.0})
    for name, before, after, pushed in [(n, 30.0, 30.0, 0.0) for n in TWO] + [*changed.values()]:
        turn.probes[name], turn.pushed[name] = [before, after], pushed
    return turn


ALONE = [a_round(2.0) for _ in range(6)]


@pytest.mark.parametrize(
    "disturbed",
    [("torch", 60, 30, 0), ("ours", 30, 60, 0), ("torch", 30, 30, 80), ("ours", 38, 39, 0)],
)
def test_a_ratio_counts_if_both_samples_ran_in_the_usual_state(
    disturbed: tuple[str, float, float, float],
) -> None:
    turns = [*ALONE, *(a_round(9.0, by=disturbed) for _ in range(8))]
    usual = stats.usual_states([CellResult(TINY, 1, 1, rounds=turns)])
    assert usual == {"torch": (30, 0), "ours": (30, 0)}
    assert stats.comparable_rounds(turns, TWO, usual) == ALONE
    assert stats.speedup(turns, *TWO, usual) == {
        "speedup": 2,
        "speedup_low": 2,
        "speedup_high": 2,
        "comparable": True,
        "verdict": "FASTER",
    }


def test_a_sample_is_as_slow_as_its_probes_and_lost_cores_say() -> None:
    usual = {"ours": stats.Usual(probe=30, pushed=100)}
    for before, after, pushed, slow in (
        (30, 45, 175, 1.25),
        (15, 30, 0, 0.75),
        (30, 30, 176, stats.SLOWEST),
        (30, 9000, 0, stats.SLOWEST),
    ):
        turn = a_round(1.0, by=("ours", before, after, pushed))
        assert stats.slowness(turn, "ours", usual) == slow


def test_a_sample_is_compared_with_those_of_the_whole_run() -> None:
    """A neighbour that stays during a cell is found by the cells before and after it."""
    busy = [a_round(2.0, a=("torch", 60, 60, 0), b=("ours", 60, 60, 80)) for _ in range(6)]
    cells = [CellResult(TINY, 1, 1, rounds=turns) for turns in (ALONE, busy)]
    assert stats.comparable_rounds(busy, TWO, stats.usual_states(cells)) == []
    # If it stays during the run, it is the machine's state.
    assert stats.comparable_rounds(busy, TWO, stats.usual_states(cells[1:])) == busy


@pytest.mark.parametrize(
    ("busy", "wider"),
    [(("torch", 45, 45, 0), 1.5), (("ours", 200, 9000, 0), 3), (("torch", 30, 30, 80), 3)],
)
def test_an_interval_is_wider_by_what_slowed_the_probes_down(
    busy: tuple[str, float, float, float], wider: float
) -> None:
    turns = [*ALONE[:2], *(a_round(2.5, by=busy) for _ in range(7))]
    found = stats.speedup(turns, *TWO, dict.fromkeys(TWO, stats.Usual(30, 0)))
    assert found is not None
    assert not found["comparable"]
    assert found["speedup"] == 2.5
    assert (found["speedup_low"], found["speedup_high"]) == pytest.approx((2 / wider, 2.5 * wider))
    assert found["verdict"] == ("FASTER" if wider < 2 else "UNSURE")


def test_a_probe_leaves_threads_and_backends_as_they_were() -> None:
    threads = torch.get_num_threads()
    with use_backend("torch"):
        assert 1 < Probe(threads + 1)() < 1e6
    assert torch.get_num_threads() == threads
    assert times_pushed() >= 0
