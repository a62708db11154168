"""How dtypes and operators may be spelled in any command: `fp32` and `float32`, `sdpa` and
`scaled_dot_product_attention`. A list is separated by commas, and its flag may be given again.

Each command has its own names for both; the functions convert a user's spelling to that name.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Collection, Iterable

from fastattn.bench import ops

# The spellings of each dtype.
_DTYPES = (
    ("fp64", "float64", "double"),
    ("fp32", "float32", "float", "single"),
    ("bf16", "bfloat16"),
    ("fp16", "float16", "half"),
)


def name_list(text: str) -> list[str]:
    """argparse type: a comma-separated list. It refuses an empty one, as of an unset variable."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def add_list(parser: argparse._ActionsContainer, flag: str, description: str) -> None:
    """Add a flag whose value is a list of names, [] if it is not given."""
    parser.add_argument(
        flag,
        type=name_list,
        action="extend",
        default=[],
        metavar="LIST",
        help=description + "; repeatable",
    )


def dtypes(names: Iterable[str], allowed: Collection[str], flag: str = "--dtype") -> list[str]:
    """Convert dtypes to the spelling of `allowed`, each once. Raises ValueError for others."""
    return _convert(names, allowed, flag, _spellings_of_dtype)


def operators(names: Iterable[str], allowed: Collection[str], flag: str = "--op") -> list[str]:
    """Convert operators to the spelling of `allowed`, each once. Raises ValueError for others."""
    return _convert(names, allowed, flag, _spellings_of_operator)


def _convert(
    names: Iterable[str],
    allowed: Collection[str],
    flag: str,
    spellings_of: Callable[[str], tuple[str, ...]],
) -> list[str]:
    converted: dict[str, None] = {}
    for name in names:
        allowed_name = next((x for x in (name, *spellings_of(name)) if x in allowed), None)
        if allowed_name is None:
            second_spellings = {
                x: next((y for y in spellings_of(x) if y != x), "") for x in allowed
            }
            choices = ", ".join(f"{x} ({y})" if y else x for x, y in second_spellings.items())
            raise ValueError(f"{flag} {name!r}: allowed are {choices}")
        converted[allowed_name] = None
    return list(converted)


def _spellings_of_dtype(name: str) -> tuple[str, ...]:
    bare_name = name.lower().removeprefix("torch.")
    return next((spellings for spellings in _DTYPES if bare_name in spellings), ())


@functools.cache
def _spellings_of_operator(name: str) -> tuple[str, ...]:
    bare_name = name.removeprefix("fastattn.")
    return next((names for op in ops.OPS if bare_name in (names := ops.names_of(op))), ())
