"""Compares two results: which rows changed, and whether the change is significant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastattn.bench import stats
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, kept_rounds, summarise

METRICS = ("time", "speedup", "memory", "error")
# The conditions that make two results comparable.
_CONDITIONS = {
    "environment": ("cpu", "isa", "torch", "fastattn", "commit", "python"),
    "settings": ("threads", "cache", "seed"),
}
_KEY = ("op", "shape", "device", "dtype", "pass", "mask", "weights", "option", "provider")
_COLUMN = {"time": "ms", "speedup": "speedup", "memory": "peak_mb", "error": "relative_error"}


@dataclass(frozen=True)
class Change:
    """One cell of one provider: `ratio` above 1 is better in the second result."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    busy: bool = False

    @property
    def provider(self) -> str:
        return self.name.split()[-1]

    @property
    def verdict(self) -> str:
        return stats.verdict(self.low, self.high)

    def is_slower_than(self, share: float) -> bool:
        """Whether the complete interval is slower by more than this share."""
        return self.high < 1 / (1 + share)


def differences(before: Result, after: Result) -> list[str]:
    """The conditions that differ, in words."""
    found = []
    for where, names in _CONDITIONS.items():
        for name in names:
            old, new = (getattr(result, where).get(name) for result in (before, after))
            if old != new:
                found.append(f"{name}: {old} and {new}")
    return found


def changes(before: Result, after: Result, metric: str) -> tuple[list[Change], list[str]]:
    """The changes of common rows, and the names of rows that only one result has."""
    old, new = (_measured(result, _COLUMN[metric]) for result in (before, after))
    both = [key for key in old if key in new]
    found = [_change(key, old[key], new[key], metric) for key in both]
    alone = [_name(key) for key in [*old, *new] if (key in old) != (key in new)]
    return found, alone


_Measured = tuple[Row, Sequence[float]]


def _measured(result: Result, column: str) -> dict[tuple[str, ...], _Measured]:
    """Every row that has a value, with its samples in milliseconds."""
    samples = kept_rounds(result)
    rows = summarise(result)
    return {
        tuple(row[name] for name in _KEY): (row, ms)
        for row, ms in zip(rows, samples, strict=True)
        if row[column] is not None
    }


def _name(key: tuple[str, ...]) -> str:
    return " ".join(word for word in key if word not in ("none", "cpu"))


def _change(key: tuple[str, ...], old: _Measured, new: _Measured, metric: str) -> Change:
    before, after = (row[_COLUMN[metric]] for row, _ in (old, new))
    if metric == "time":
        low, high = _interval(old[1], new[1])
        busy = old[0]["busy"] or new[0]["busy"]
        return Change(_name(key), before, after, before / after, low, high, busy)
    if metric == "speedup":
        # A ratio to the baseline of its own run is comparable between machines and days.
        bounds = [row[f"speedup_{end}"] for row, _ in (old, new) for end in ("low", "high")]
        low, high = bounds[2] / bounds[1], bounds[3] / bounds[0]
        return Change(_name(key), before, after, after / before, low, high)
    ratio = 1.0 if before == after else before / after if after else float("inf")
    return Change(_name(key), before, after, ratio, ratio, ratio)


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The interval of the ratio of two medians of independent samples.

    The logarithms of the two intervals add up as independent errors do.
    """
    ratio = stats.median(before) / stats.median(after)
    (low, high), (least, most) = (
        [end / stats.median(samples) for end in stats.median_interval(samples)]
        for samples in (before, after)
    )
    return (
        ratio / math.exp(math.hypot(math.log(low), math.log(most))),
        ratio * math.exp(math.hypot(math.log(high), math.log(least))),
    )
