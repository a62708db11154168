"""Statistics of repeated timings: medians, intervals, and verdicts on ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

import torch

__all__ = ["CONFIDENCE", "FEWEST", "median", "median_interval", "quantile", "verdict"]

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
