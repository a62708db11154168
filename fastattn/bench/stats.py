"""Statistics of repeated timings: medians, intervals, and verdicts on ratios."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

CONFIDENCE = 0.95
RESAMPLES = 1000
# Times within this ratio are called the same, however narrow their interval is.
SAME_WITHIN = 0.02


def quantile(samples: Sequence[float], share: float) -> float:
    """Linear interpolation between the order statistics, as numpy's default does."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)


def bootstrap_interval(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = median,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval: the 2.5 % and 97.5 % quantiles of resamples."""
    draw = random.Random(seed)
    values = [statistic(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return quantile(values, tail), quantile(values, 1 - tail)


def speedup(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[float, float, float]:
    """The speed-up of the candidate and its interval, from times of the *same* rounds.

    It is the median of the ratios within each round, where both ran under the same conditions.
    """
    ratios = [b / c for b, c in zip(baseline, candidate, strict=True)]
    return median(ratios), *bootstrap_interval(ratios)


def verdict(low: float, high: float) -> str:
    """FASTER, SLOWER or SAME if that holds for the complete interval of a speed-up, else UNSURE."""
    if low > 1 + SAME_WITHIN:
        return "FASTER"
    if high < 1 / (1 + SAME_WITHIN):
        return "SLOWER"
    if low >= 1 / (1 + SAME_WITHIN) and high <= 1 + SAME_WITHIN:
        return "SAME"
    return "UNSURE"
