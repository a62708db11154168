"""Verdicts on a busy machine: which rounds count."""

from __future__ import annotations

import pytest
from bench_results import TINY

from fastattn.bench import results
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
    usual = results.usual_states([CellResult(TINY, 1, 1, rounds=turns)])
    assert usual == {"torch": (30, 0), "ours": (30, 0)}
    assert results.comparable_rounds(turns, TWO, usual) == ALONE
    found = results.speedup(turns, *TWO, usual)
    assert found is not None
    assert (found["speedup"], found["verdict"], found["comparable"]) == (2, "FASTER", True)


def test_a_sample_is_compared_with_the_whole_run() -> None:
    """Load that lasts a whole cell is detected by the cells before and after it."""
    busy = [a_round(2.0, a=("torch", 60, 60, 0), b=("ours", 60, 60, 80)) for _ in range(6)]
    cells = [CellResult(TINY, 1, 1, rounds=turns) for turns in (ALONE, busy)]
    assert results.comparable_rounds(busy, TWO, results.usual_states(cells)) == []
    # Load that lasts the whole run is the machine's usual state.
    assert results.comparable_rounds(busy, TWO, results.usual_states(cells[1:])) == busy
