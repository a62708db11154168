"""Analyses a mask function of transformers without creating its matrix.

Such a function takes the indices (batch, head, query, key) and returns whether the pair takes part.
Here it is called with symbolic indices that record the operations on them. The recorded pattern
must be a conjunction of two kinds of rules; otherwise the function is not supported:

    least <= q - k <= most                       causal, a window, both
    groups[b, q] == groups[b, k]                 packed sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The pairs that take part: with d = q - k, ``-right <= d <= left``; -1 is unlimited.

    ``segments`` [B, L] numbers the packed sequences: both of a pair must have the same number.
    """

    left: int = -1
    right: int = -1
    segments: Tensor | None = None


def in_window(distance: Tensor, left: int, right: int) -> Tensor:
    """Whether ``-right <= distance <= left``; -1 is unlimited."""
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        inside = inside & (distance <= left)
    if right >= 0:
        inside = inside & (distance >= -right)
    return inside


def pattern_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """Return the :class:`Pattern` of ``mask_function``, or None for an unsupported function."""
    batch, head, query, key = (_Index(axis) for axis in ("batch", "head", "query", "key"))
    try:
        rule = mask_function(batch, head, query, key)
    except Exception:  # the function uses its arguments in an unsupported way
        return None
    return rule.pattern() if isinstance(rule, _Rule) else None


class _Unsupported(Exception):
    """A mask function does something that no :class:`Pattern` describes."""


class _Symbol:
    """The base of symbols: supports PyTorch's operators of a tensor and a symbol."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensor, symbol = args
        if function is Tensor.__getitem__ and isinstance(symbol, tuple):  # table[b, q]
            batch, index = symbol
            if batch.axis == "batch" and index.table is None and index.shift == 0:
                return _Index(index.axis, table=tensor)
        if function is Tensor.__and__ and tensor.numel() == 1 and bool(tensor):  # True & rule
            return symbol
        raise _Unsupported


@dataclass(frozen=True, eq=False)
class _Index(_Symbol):
    """``table[b, axis] + shift``; ``axis + shift`` without a table."""

    axis: str
    shift: int = 0
    table: Tensor | None = None

    def new_ones(self, size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Called by mask functions that begin with ``q_idx.new_ones(())``."""
        return torch.ones(size, dtype=dtype)

    def __add__(self, shift: int) -> _Index:
        return replace(self, shift=self.shift + _integer(shift))

    def __sub__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            return self + -_integer(other)
        if {self.axis, other.axis} != {"query", "key"} or self.table is not other.table:
            raise _Unsupported
        sign = 1 if self.axis == "query" else -1
        return _Distance(sign, self.shift - other.shift, self.table)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, _Index):
            raise _Unsupported
        distance = self - other
        if self.table is None:
            return distance._between(0, 0)
        if distance.shift:
            raise _Unsupported
        return _Rule(segments=self.table)

    def __le__(self, other: Any) -> _Rule:
        return (other - self) >= 0

    def __lt__(self, other: Any) -> _Rule:
        return (other - self) > 0

    def __gt__(self, other: Any) -> _Rule:
        return (self - other) > 0

    def __ge__(self, other: Any) -> _Rule:
        if isinstance(other, _Index):
            return (self - other) >= 0
        if self.table is None and self.shift >= _integer(other):  # positions are never negative
            return _Rule()
        raise _Unsupported


@dataclass(frozen=True)
class _Distance(_Symbol):
    """``sign · (q - k) + shift``, or its absolute value."""

    sign: int
    shift: int
    table: Tensor | None
    absolute: bool = False

    def __abs__(self) -> _Distance:
        if self.shift:
            raise _Unsupported
        return replace(self, absolute=True)

    def __le__(self, upper: int) -> _Rule:
        upper = _integer(upper)
        return self._between(-upper if self.absolute else -math.inf, upper)

    def __lt__(self, bound: int) -> _Rule:
        return self <= _integer(bound) - 1

    def __ge__(self, lower: int) -> _Rule:
        if self.absolute:
            raise _Unsupported
        return self._between(_integer(lower), math.inf)

    def __gt__(self, bound: int) -> _Rule:
        return self >= _integer(bound) + 1

    def _between(self, lower: float, upper: float) -> _Rule:
        """The rule lower <= distance <= upper, as bounds of q - k."""
        lower, upper = lower - self.shift, upper - self.shift
        if self.sign < 0:
            lower, upper = -upper, -lower
        return _Rule(lower, upper, positions=() if self.table is None else (self.table,))


@dataclass(frozen=True)
class _Rule(_Symbol):
    """``least <= q - k <= most`` and, with ``segments``, q and k in the same segment."""

    least: float = -math.inf  # of q - k
    most: float = math.inf
    segments: Tensor | None = None
    positions: tuple[Tensor, ...] = ()  # tables that q and k were looked up in

    device = torch.device("cpu")

    def to(self, device: Any) -> _Rule:  # mask functions move their rules to a device
        return self

    def __and__(self, other: Any) -> _Rule:
        if not isinstance(other, _Rule):
            raise _Unsupported
        if self.segments is not None and other.segments is not None:
            raise _Unsupported
        return _Rule(
            max(self.least, other.least),
            min(self.most, other.most),
            other.segments if self.segments is None else self.segments,
            self.positions + other.positions,
        )

    def pattern(self) -> Pattern | None:
        """The pattern of the rule; None if it has no such form."""
        left, right = self.most, -self.least
        if left < 0 or right < 0 or not self._positions_count_rows():
            return None
        return Pattern(
            -1 if left == math.inf else int(left),
            -1 if right == math.inf else int(right),
            self.segments,
        )

    def _positions_count_rows(self) -> bool:
        """Whether the rows of each sequence are consecutive and its positions increase by 1.

        Then differences of positions equal differences of rows.
        """
        if self.segments is None:
            return not self.positions
        steps = self.segments.diff(dim=-1)
        inside = steps == 0
        return bool((steps >= 0).all()) and all(
            bool(((table.diff(dim=-1) == 1) | ~inside).all()) for table in self.positions
        )


def _integer(x: Any) -> int:
    """x, if its type is int; mask functions with other bounds are not supported."""
    if type(x) is not int:
        raise _Unsupported
    return x
