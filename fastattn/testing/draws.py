"""The random numbers of a case: those of the default draw, or of another one."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["alibi_slopes", "cached", "draw", "dropout_seed", "generator_of", "numbers_of"]

_current: ContextVar[int] = ContextVar("fastattn_draw", default=0)
_Result = TypeVar("_Result")


@contextlib.contextmanager
def draw(number: int) -> Iterator[None]:
    """Give all cases the values of this draw within the block; 0 is the default."""
    token = _current.set(number)
    try:
        yield
    finally:
        _current.reset(token)


def generator_of(name: str) -> torch.Generator:
    """Return the generator of the case with this name, in the current draw."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + (_current.get() << 32))


def numbers_of(name: str) -> tuple[torch.Generator, Callable[..., Tensor]]:
    """Return the generator of a case, and a function that draws normal numbers from it, float64."""
    generator = generator_of(name)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return generator, normal


def dropout_seed(generator: torch.Generator, dropout_p: float) -> Tensor | None:
    """Return the seed of a case's dropout; None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (), generator=generator, dtype=torch.int64)


def alibi_slopes(
    generator: torch.Generator, kind: str | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """[1, heads] for "h", [batch, heads] for "bh", else None; float64 for float64, else float32."""
    if kind is None:
        return None
    slopes = torch.rand(batch if kind == "bh" else 1, heads, generator=generator)
    return slopes.to(torch.promote_types(dtype, torch.float32))


def cached(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the last results of ``function``, separately for each draw."""

    @functools.lru_cache(maxsize=32)
    def of_draw(number: int, *args: Any) -> _Result:
        return function(*args)

    @functools.wraps(function)
    def of_current_draw(*args: Any) -> _Result:
        return of_draw(_current.get(), *args)

    return of_current_draw
