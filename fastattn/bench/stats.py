"""Statistics of repeated timings, and which rounds of a cell count: for times, those without a
disturbance; for ratios, those whose samples can be compared.

Times and shares of the peak are absolute, so the peaks beside a round must show that the machine
was undisturbed. A ratio needs less: that both of its samples ran in the same state of the cores
(:mod:`fastattn.bench.gauges`), which is the usual one of the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from statistics import median as median
from typing import Any, NamedTuple

import torch

from fastattn.bench.results import CellResult, Round

CONFIDENCE = 0.95
FEWEST = 3  # with fewer samples there is no interval
# Quantiles of Student's t for intervals of 95 % of three to five samples.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
# Times within this ratio are called the same, however narrow their interval is.
SAME_WITHIN = 0.02


def quantile(samples: Sequence[float], share: float) -> float:
    """Linear interpolation between the order statistics."""
    return float(torch.tensor(samples, dtype=torch.float64).quantile(share))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median of positive times or ratios with at least 95 %.

    From six samples on, it ends at two of them, which holds for every distribution: n samples are
    all above the median with probability 2^-n, and so on. Three to five are too few for that: the
    interval is Student's, of their logarithms. One or two return the least and the greatest.
    """
    ordered, count = sorted(samples), len(samples)
    if count in _STUDENT and ordered[0] > 0:
        logs = [math.log(x) for x in ordered]
        half = _STUDENT[count] * stdev(logs) / math.sqrt(count)
        return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)
    cut, below = 0, 1  # samples cut off at either end, and 2^n times the probability beyond
    while 2 * (below + math.comb(count, cut + 1)) <= (1 - CONFIDENCE) * 2**count:
        cut += 1
        below += math.comb(count, cut)
    return ordered[cut], ordered[-1 - cut]


def verdict(low: float, high: float) -> str:
    """FASTER, SLOWER or SAME if that holds for the complete interval of a speed-up, else UNSURE."""
    if low > 1 + SAME_WITHIN:
        return "FASTER"
    if high < 1 / (1 + SAME_WITHIN):
        return "SLOWER"
    if low >= 1 / (1 + SAME_WITHIN) and high <= 1 + SAME_WITHIN:
        return "SAME"
    return "UNSURE"


# A round counts if the lower of the peaks before and after it is at least this share of the higher.
# Slow changes between cells do not disqualify a round: the clock depends on the load.
QUIET = 0.9
# ... and if the higher one is at least this share of the best one in the same cell
STEADY = 0.75
# ... and if its threads received this share of their cores: sharing one of two cores with another
# process leaves three quarters, and waking the threads takes up to a tenth of a short measurement.
QUIET_SHARE = 0.8
MIN_KEPT = FEWEST
# Samples are compared if their probes took at most this many times as long as usual in the run, and
# if their threads lost a core at most as many times as often, or at most once in a sample of 20 ms.
COMPARABLE = 1.25
PUSHED = 50.0
# No sample counts as slower than this: on a Xeon with AMX a neighbour slows kernels on tiles down
# by 2.3 to 3 times, and others by 1.1 to 1.5.
SLOWEST = 3.0


def quiet_rounds(rounds: list[Round]) -> list[Round]:
    """The rounds of a cell that were undisturbed, according to the guards."""
    floor = STEADY * max((turn.peak for turn in rounds), default=0.0)
    quiet = (turn for turn in rounds if min(turn.guard) >= QUIET * turn.peak)
    return [turn for turn in quiet if turn.peak >= floor and turn.share >= QUIET_SHARE]


class Usual(NamedTuple):
    """The usual state of a provider's cores: the lower quartile of a run."""

    probe: float  # microseconds
    pushed: float  # how often a second a core is lost


def usual_states(cells: Iterable[CellResult]) -> dict[str, Usual]:
    """The usual state of each provider; none without probes.

    A machine that is busy most of the time is so compared with itself.
    """
    probes: dict[str, list[float]] = {}
    pushed: dict[str, list[float]] = {}
    for turn in (turn for cell in cells for turn in cell.rounds):
        for name, beside in turn.probes.items():
            probes.setdefault(name, []).extend(beside)
            pushed.setdefault(name, []).append(turn.pushed[name])
    quartiles = ({name: quantile(x, 0.25) for name, x in of.items()} for of in (probes, pushed))
    probe, often = quartiles
    return {name: Usual(probe[name], often[name]) for name in probes}


def slowness(turn: Round, name: str, usual: Mapping[str, Usual]) -> float:
    """How many times as slow as usual the cores were during a sample, at most `SLOWEST`."""
    if turn.pushed[name] > PUSHED + COMPARABLE * usual[name].pushed:
        return SLOWEST
    return min(SLOWEST, sum(turn.probes[name]) / 2 / usual[name].probe)


def comparable_rounds(
    rounds: list[Round], names: Collection[str], usual: Mapping[str, Usual]
) -> list[Round]:
    """The rounds in which the samples of these providers ran in the usual state.

    Where samples have no probes, the guards beside the round decide.
    """
    if not usual:
        return _with(quiet_rounds(rounds), names)
    return [turn for turn in _with(rounds, names) if _slowest(turn, names, usual) <= COMPARABLE]


def _slowest(turn: Round, names: Collection[str], usual: Mapping[str, Usual]) -> float:
    return max(slowness(turn, name, usual) for name in names)


def _with(rounds: list[Round], names: Collection[str]) -> list[Round]:
    return [turn for turn in rounds if turn.ms.keys() >= set(names)]


def speedup(
    rounds: list[Round], baseline: str, provider: str, usual: Mapping[str, Usual]
) -> dict[str, Any] | None:
    """The ratio of two providers, from the ratios within rounds; None without a common round.

    If too few rounds are comparable, all of them count. What slowed the probes down may have slowed
    one of the providers down as much and the other not, so the interval is as much wider.
    """
    names = (baseline, provider)
    chosen, wider = comparable_rounds(rounds, names, usual), 1.0
    if not (comparable := len(chosen) >= MIN_KEPT):
        if not (chosen := _with(rounds, names)):
            return None
        if usual:
            wider = max(1.0, median([_slowest(turn, names, usual) for turn in chosen]))
    ratios = [turn.ms[baseline] / turn.ms[provider] for turn in chosen]
    low, high = median_interval(ratios)
    low, high = low / wider, high * wider
    return {
        "speedup": median(ratios),
        "speedup_low": low,
        "speedup_high": high,
        "comparable": comparable,
        "verdict": verdict(low, high) if len(ratios) >= FEWEST else "UNSURE",
    }
