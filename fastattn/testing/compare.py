"""The error bound, one for every test:

    max|x - ref64| <= 2 * max|eager - ref64| + 4 * eps * max|ref64|

x is the candidate; ref64 is the same operator on the same (already rounded) inputs in float64;
eager is plain PyTorch in the candidate's precision, each operation rounded. So a kernel may be as
wrong as PyTorch is, twice, and no tolerance is anyone's choice. eps is that of x's dtype, or of the
dtype that x was computed from where that is coarser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Deviation", "assert_within_bound", "deviation"]


@dataclass(frozen=True)
class Deviation:
    """How far one result is from the reference, and where it is worst."""

    name: str
    error: float  # max|x - ref64|; inf where exactly one of the two is finite
    bound: float
    index: tuple[int, ...]  # of the worst element
    got: float
    want: float
    shape: tuple[int, ...]
    wrong: int  # how many elements are off by more than the bound

    @property
    def ratio(self) -> float:
        """error / bound: at most 1 is right."""
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
    eager: Tensor,
    reference: Tensor,
    name: str = "x",
    dtype: torch.dtype | None = None,
) -> Deviation:
    """Measure ``candidate`` against the bound, with the eps of ``dtype`` (default: its own).

    Where the reference is inf, -inf or NaN, the candidate must be the same. Raises ValueError for a
    wrong shape, or if eager PyTorch is not finite where the reference is: that gives no bound.
    """
    shape = tuple(reference.shape)
    if tuple(candidate.shape) != shape or tuple(eager.shape) != shape:
        raise ValueError(f"{name}: shape {list(candidate.shape)}, want {list(shape)}")
    if reference.numel() == 0:
        return Deviation(name, 0.0, 0.0, (), 0.0, 0.0, shape, 0)
    x, e, r = (t.detach().double() for t in (candidate, eager, reference))
    finite = torch.isfinite(r)
    if not torch.isfinite(e[finite]).all():
        raise ValueError(f"{name}: the eager result is not finite, so there is no bound")
    noise = _largest((e - r)[finite])
    bound = 2 * noise + 4 * torch.finfo(dtype or candidate.dtype).eps * _largest(r[finite])
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


def assert_within_bound(
    candidate: Tensor,
    eager: Tensor,
    reference: Tensor,
    name: str = "x",
    dtype: torch.dtype | None = None,
) -> float:
    """Raise AssertionError, naming the worst element, unless the bound holds; return the ratio."""
    result = deviation(candidate, eager, reference, name, dtype)
    if not result.ok:
        raise AssertionError(str(result))
    return result.ratio


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
