"""How dtypes and operators may be spelled in any command: `fp32` and `float32`, `sdpa` and
`scaled_dot_product_attention`. A list is separated by commas, and its flag may be given again.

Each command has its own names for both. The given spelling is converted to the command's name.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Collection, Iterable

from fastattn.bench import ops

# One line, one dtype.
_DTYPES = (
    ("fp64", "float64", "double"),
    ("fp32", "float32", "float", "single"),
    ("bf16", "bfloat16"),
    ("fp16", "float16", "half"),
)


def name_list(text: str) -> list[str]:
    """argparse type: a comma-separated list, never empty, as an unset shell variable would be."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def add_list(parser: argparse._ActionsContainer, flag: str, words: str) -> None:
    """Add a flag whose value is a list of names, [] if it is not given."""
    parser.add_argument(
        flag,
        type=name_list,
        action="extend",
        default=[],
        metavar="LIST",
        help=words + "; repeatable",
    )


def dtypes(given: Iterable[str], allowed: Collection[str], flag: str = "--dtype") -> list[str]:
    """The dtypes in the spelling of `allowed`, each once. Raises ValueError for any other."""
    return _spelled(given, allowed, flag, _dtypes_like)


def operators(given: Iterable[str], allowed: Collection[str], flag: str = "--op") -> list[str]:
    """The operators in the spelling of `allowed`, each once. Raises ValueError for any other."""
    return _spelled(given, allowed, flag, _operators_like)


def _spelled(
    given: Iterable[str],
    allowed: Collection[str],
    flag: str,
    like: Callable[[str], tuple[str, ...]],
) -> list[str]:
    found: dict[str, None] = {}
    for name in given:
        same = [other for other in (name, *like(name)) if other in allowed]
        if not same:
            names = (f"{n} ({o})" if (o := _other(n, like)) else n for n in allowed)
            raise ValueError(f"{flag} {name!r}: allowed are {', '.join(names)}")
        found[same[0]] = None
    return list(found)


def _other(name: str, like: Callable[[str], tuple[str, ...]]) -> str:
    """Another spelling of a name, the first one if there are several."""
    return next((other for other in like(name) if other != name), "")


def _dtypes_like(name: str) -> tuple[str, ...]:
    plain = name.lower().removeprefix("torch.")
    return next((line for line in _DTYPES if plain in line), ())


@functools.cache
def _operators_like(name: str) -> tuple[str, ...]:
    plain = name.removeprefix("fastattn.")
    return next((alike for op in ops.OPS if plain in (alike := ops.names_of(op))), ())
