"""One case, and where one draw of its values is beyond the bound, nine of them together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastattn.testing import Case, check


def faults_beyond_chance(case: Case, dtype: torch.dtype, target: Any) -> list[str]:
    """What is wrong with a case by the bound, or where one draw exceeds it, by that of nine draws.

    The bound sets our largest error beside PyTorch's on the same values, and of a few results
    PyTorch's may by chance be next to nothing: a search finds these. A kernel that is less exact
    than it should be is so on every draw.
    """
    verdict = check(case, dtype, target)
    if verdict.ok:
        return []
    draws = [replace(case, name=f"random-{n}") for n in range(8)]
    verdicts = [verdict, *(check(draw, dtype, target) for draw in draws)]
    measured = {str(d) for v in verdicts for d in v.deviations}
    faults = [fault for v in verdicts for fault in v.faults if fault not in measured]
    for several in zip(*(v.deviations for v in verdicts), strict=True):
        error, bound = max(d.error for d in several), max(d.bound for d in several)
        if error > bound:
            faults.append(f"{error / bound:.2f} x the bound of nine draws: {several[0]}")
    return faults
