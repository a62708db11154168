"""Compares two results: which rows changed, and whether the change is significant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fastattn.bench import stats
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, kept_rounds, summarise

# The metrics, and their columns.
METRICS = {"time": "ms", "speedup": "speedup", "memory": "peak_mb", "error": "relative_error"}
_KEY = ("op", "shape", "device", "dtype", "pass", "mask", "weights", "option", "provider")


class Change(NamedTuple):
    """One cell of one provider: `ratio` above 1 is better in the second result."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    busy: bool = False

    @property
    def verdict(self) -> str:
        return stats.verdict(self.low, self.high)


def changes(before: Result, after: Result, metric: str) -> tuple[list[Change], list[str]]:
    """The changes of common rows, and the names of rows that only one result has."""
    old, new = (_measured(result, METRICS[metric]) for result in (before, after))
    found = [_change(name, *old[name], *new[name], metric) for name in old if name in new]
    return found, [name for name in [*old, *new] if (name in old) != (name in new)]


def _measured(result: Result, column: str) -> dict[str, tuple[Row, list[float]]]:
    """Every row that has a value, with its samples in milliseconds, by its name."""
    rows = zip(summarise(result), kept_rounds(result), strict=True)
    return {
        " ".join(word for name in _KEY if (word := row[name]) not in ("none", "cpu")): (row, ms)
        for row, ms in rows
        if row[column] is not None
    }


def _change(
    name: str, was: Row, old_ms: list[float], now: Row, new_ms: list[float], metric: str
) -> Change:
    before, after = was[METRICS[metric]], now[METRICS[metric]]
    if metric == "time":
        low, high = _interval(old_ms, new_ms)
        return Change(name, before, after, before / after, low, high, was["busy"] or now["busy"])
    if metric == "speedup":
        # A ratio to the baseline of its own run is comparable between machines and days.
        low = now["speedup_low"] / was["speedup_high"]
        high = now["speedup_high"] / was["speedup_low"]
        return Change(name, before, after, after / before, low, high)
    ratio = 1.0 if before == after else before / after if after else math.inf
    return Change(name, before, after, ratio, ratio, ratio)


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The interval of the ratio of two medians of independent samples.

    The logarithms of the two intervals add up as independent errors do.
    """
    ratio = stats.median(before) / stats.median(after)
    (low, high), (least, most) = (
        [math.log(end / stats.median(samples)) for end in stats.median_interval(samples)]
        for samples in (before, after)
    )
    return ratio * math.exp(-math.hypot(low, most)), ratio * math.exp(math.hypot(high, least))
