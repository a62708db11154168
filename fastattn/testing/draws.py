"""Which numbers a case is made of: always the same ones, or those of another draw."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

__all__ = ["cached", "draw", "generator_of"]

_current: ContextVar[int] = ContextVar("fastattn_draw", default=0)
_Result = TypeVar("_Result")


@contextlib.contextmanager
def draw(number: int) -> Iterator[None]:
    """Within the block every case has the values of this draw; 0 is that of the tests."""
    token = _current.set(number)
    try:
        yield
    finally:
        _current.reset(token)


def generator_of(name: str) -> torch.Generator:
    """The generator of the case with this name, in the current draw."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + (_current.get() << 32))


def cached(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep the last results of ``function``, which may depend on the draw."""

    @functools.lru_cache(maxsize=32)
    def of_draw(number: int, *args: Any) -> _Result:
        return function(*args)

    @functools.wraps(function)
    def of_current_draw(*args: Any) -> _Result:
        return of_draw(_current.get(), *args)

    return of_current_draw
