"""The error bound of all tests and operators:

    max|x - ref| <= 4 noise + eps max|ref|

x is the candidate. ref is the same operator on the same, already rounded inputs in float64, or in
extended precision for float64 candidates. noise is the deviation of the definition by rounding
alone: :class:`fastattn.testing.rounding.Noise`. eps is that of the dtype of x, or of the dtype that
x was computed in if that is coarser. docs/numerics.md explains the bound and its margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.testing.rounding import Noise

__all__ = ["SAFETY", "Deviation", "deviation", "deviations"]

SAFETY = 4.0  # correct results stay below half of the bound, see docs/numerics.md
_CLEARLY_RIGHT = 0.5


@dataclass(frozen=True)
class Deviation:
    """The deviation of one result from the reference, and its worst element."""

    name: str
    error: float  # max|x - ref|; inf if exactly one of the two is finite
    bound: float
    index: tuple[int, ...]  # of the worst element
    got: float
    want: float
    shape: tuple[int, ...]
    wrong: int  # the number of elements that deviate by more than the bound

    @property
    def ratio(self) -> float:
        """error / bound; at most 1 is correct."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else float("inf")

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.shape)}: max error {self.error:.3g} is {self.ratio:.3g} x the "
            f"bound {self.bound:.3g}; worst at {list(self.index)}: got {self.got:.9g}, want "
            f"{self.want:.9g}; {self.wrong} of {torch.Size(self.shape).numel()} elements are off"
        )


def deviation(
    candidate: Tensor,
    reference: Tensor,
    noise: float,
    name: str = "x",
    dtype: torch.dtype | None = None,
) -> Deviation:
    """Measure ``candidate`` against the bound, with the eps of ``dtype`` (default: its own).

    If the reference is inf, -inf or NaN, the candidate must be equal to it. Raises ValueError for a
    wrong shape.
    """
    shape = tuple(reference.shape)
    if tuple(candidate.shape) != shape:
        raise ValueError(f"{name}: shape {list(candidate.shape)}, want {list(shape)}")
    if reference.numel() == 0:
        return Deviation(name, 0.0, 0.0, (), 0.0, 0.0, shape, 0)
    x, r = candidate.detach().double(), reference.detach().double()
    finite = torch.isfinite(r)
    largest = float(r[finite].abs().max()) if finite.any() else 0.0
    bound = SAFETY * noise + torch.finfo(dtype or candidate.dtype).eps * largest
    same = (x == r) | (torch.isnan(x) & torch.isnan(r))
    comparable = finite & torch.isfinite(x)
    off = torch.where(comparable, (x - r).abs(), torch.where(same, 0.0, float("inf")))
    worst = int(off.flatten().argmax())
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(worst), shape))
    return Deviation(
        name=name,
        error=float(off[index]),
        bound=bound,
        index=index,
        got=float(x[index]),
        want=float(r[index]),
        shape=shape,
        wrong=int((off > bound).sum()),
    )


def deviations(
    candidates: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    noise: Noise,
    eps_of: Mapping[str, torch.dtype] | None = None,
) -> list[Deviation]:
    """Measure each candidate; ``eps_of`` has the dtype of eps if that is not the candidate's.

    The noise is drawn until all ratios are below one half, or as often as allowed. Earlier draws,
    for other candidates, are used too.
    """
    eps_of = eps_of or {}
    found: list[Deviation] = []
    may_draw = noise.drawn > 0 or noise.draw()
    while may_draw or not found:
        found = [
            deviation(x, exact[name], noise.largest[name], name, eps_of.get(name))
            for name, x in candidates.items()
        ]
        if all(d.ratio <= _CLEARLY_RIGHT for d in found):
            break
        may_draw = noise.draw()
    return found
