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
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


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


def dtypes(names: Iterable[str], allowed: Collection[str], flag: str = "--dtype") -> list[str]:
    """The dtypes in the spelling of `allowed`, each once. Raises ValueError for any other."""
    return _respelled(names, allowed, flag, _spellings_of_dtype)


def operators(names: Iterable[str], allowed: Collection[str], flag: str = "--op") -> list[str]:
    """The operators in the spelling of `allowed`, each once. Raises ValueError for any other."""
    return _respelled(names, allowed, flag, _spellings_of_operator)


def _respelled(
    names: Iterable[str],
    allowed: Collection[str],
    flag: str,
    spellings_of: Callable[[str], tuple[str, ...]],
) -> list[str]:
    respelled: dict[str, None] = {}
    for name in names:
        same = next((x for x in (name, *spellings_of(name)) if x in allowed), None)
        if same is None:
            others = {x: next((y for y in spellings_of(x) if y != x), "") for x in allowed}
            choices = ", ".join(f"{x} ({y})" if y else x for x, y in others.items())
            raise ValueError(f"{flag} {name!r}: allowed are {choices}")
        respelled[same] = None
    return list(respelled)


def _spellings_of_dtype(name: str) -> tuple[str, ...]:
    bare = name.lower().removeprefix("torch.")
    return next((line for line in _DTYPES if bare in line), ())


@functools.cache
def _spellings_of_operator(name: str) -> tuple[str, ...]:
    bare = name.removeprefix("fastattn.")
    return next((names for op in ops.OPS if bare in (names := ops.names_of(op))), ())
