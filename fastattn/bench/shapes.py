"""The grammar of `--shapes`: `B=1,H=8,Lq=128:8192:x2,Lk=Lq,D=64`.

A value may also be a list 1|4|16. A shape with several ranges or lists means every combination. If
an operator has H and one of D and E, the other of the two may be given instead. A line, on the
command line or in a file, may contain more:

    [OPERATOR] [SHAPE] [dtype=LIST] [pass=LIST] [mask=LIST] [weights=LIST] [option=LIST] [# LABEL]
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Defaults = Mapping[str, "int | str"]
MAX_SHAPES = 1000
_VALUE = re.compile(r"(\d+)(?::(\d+):([x+])(\d+))?")
LISTS = ("dtype", "pass", "mask", "weights", "option")  # keys of a line


class Line(NamedTuple):
    """A parsed line of `--shapes`; missing parts are empty."""

    op: str
    shape: str
    lists: dict[str, list[str]]  # by the keys in LISTS
    label: str


def parse_line(text: str) -> Line:
    """Parses a line. Raises ValueError, which names the unexpected word."""
    words, _, label = text.partition("#")
    op, shape, lists = "", "", {}
    for word in words.split():
        key, equals, value = word.partition("=")
        if equals and key in LISTS:
            lists[key] = [name for name in value.split(",") if name]
        elif equals and not shape:
            shape = word
        elif not equals and not op and not shape:
            op = word
        else:
            form = " ".join(f"[{name}=LIST]" for name in LISTS)
            raise ValueError(
                f"--shapes: {word!r} does not belong in {text.strip()!r}; the form is "
                f"[OPERATOR] [SHAPE] {form} [# LABEL]"
            )
    if not shape and not op:
        raise ValueError(f"--shapes: {text.strip()!r} has no KEY=VALUE and no operator")
    return Line(op, shape, lists, label.strip())


def read_lines(path: Path) -> list[Line]:
    """The lines of a file, without empty ones and comments, which begin with #."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if text.strip() and not text.lstrip().startswith("#"):
            try:
                lines.append(parse_line(text))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"--shapes @{path}: the file has no shape")
    return lines


def parse_shapes(text: str, defaults: Defaults) -> list[dict[str, int]]:
    """Every combination that `text` describes, each with all keys of the operator."""
    # Other keys that may be given instead of one of the operator.
    aliases = ["L"] if "Lq" in defaults and "L" not in defaults else []
    if "H" in defaults:
        aliases += [{"D": "E", "E": "D"}[key] for key in ("D", "E") if key in defaults]
    keys = [*defaults, *aliases]
    ranges: dict[str, list[int]] = {}
    references: dict[str, str] = {}  # to other keys
    for part in text.split(",") if text else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"--shapes: {part.strip()!r} is not KEY=VALUE; keys are {', '.join(keys)}"
            )
        if key not in keys:
            raise ValueError(f"--shapes: unknown key {key!r}; keys are {', '.join(keys)}")
        if key in ranges or key in references:
            raise ValueError(f"--shapes: {key} is given twice")
        if value in keys:
            references[key] = value
        else:
            ranges[key] = _values(key, value, defaults.get(key))
    count = math.prod(map(len, ranges.values()))
    if count > MAX_SHAPES:
        raise ValueError(f"--shapes: {count} combinations, at most {MAX_SHAPES} are allowed")
    return [
        _complete(dict(zip(ranges, combination, strict=True)), references, defaults)
        for combination in itertools.product(*ranges.values())
    ]


def shape_text(sizes: Mapping[str, int], defaults: Defaults) -> str:
    """Format sizes in this grammar, leaving out defaults and zeros."""
    parts = []
    for key, default in defaults.items():
        size = sizes.get(key, 0)
        if key == "Lq" and defaults.get("Lk") == "Lq" and sizes["Lk"] == size:
            parts.append(f"L={size}")
        elif size and (not isinstance(default, str) or sizes[default] != size):
            parts.append(f"{key}={size}")
    return ",".join(parts)


def _values(key: str, text: str, default: int | str | None) -> list[int]:
    values: list[int] = []
    for item in text.split("|"):
        match = _VALUE.fullmatch(item)
        if match is None:
            raise ValueError(
                f"--shapes: {key}={text} is neither a number, a list 1|2|4, a range FROM:TO:x2 or "
                "FROM:TO:+64, nor another key"
            )
        value, end, by = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
        if match[2] and (value < 1 or value > end or by < (2 if match[3] == "x" else 1)):
            raise ValueError(
                f"--shapes: the range {key}={item} does not go upwards from at least 1"
            )
        values.append(value)
        while match[2] and (value := value * by if match[3] == "x" else value + by) <= end:
            values.append(value)
    least = 0 if default == 0 else 1  # only a size whose default is 0 may be 0
    if min(values) < least:
        raise ValueError(f"--shapes: {key}={text} must be at least {least}")
    return values


def _complete(
    given: dict[str, int], references: Mapping[str, str], defaults: Defaults
) -> dict[str, int]:
    """Resolves references and aliases, and adds the defaults."""
    for key, other in references.items():
        if other not in given:
            raise ValueError(f"--shapes: {key}={other}, but {other} is not given as a number")
        given[key] = given[other]
    if "L" in given and "L" not in defaults:
        if "Lq" in given or "Lk" in given:
            raise ValueError("--shapes: give either L or Lq and Lk")
        given["Lq"] = given["Lk"] = given.pop("L")
    elif "Lk" in given and defaults["Lk"] == "Lq":
        given.setdefault("Lq", given["Lk"])
    if "H" in defaults:  # E = H·D
        heads = given.get("H", int(defaults["H"]))
        if "E" in given and "D" in given and given["D"] * heads != given["E"]:
            raise ValueError(
                f"--shapes: E={given['E']} is not H·D = {heads}·{given['D']}; give either E or D"
            )
        if "D" in defaults and (embed := given.pop("E", None)) is not None:
            if embed % heads:
                raise ValueError(f"--shapes: E={embed} is not a multiple of H={heads}")
            given["D"] = embed // heads
        if "E" in defaults and (width := given.pop("D", None)) is not None:
            given["E"] = heads * width
    return with_defaults(given, defaults)


def with_defaults(given: Mapping[str, int], defaults: Defaults) -> dict[str, int]:
    """The sizes in the order of the operator; a missing size has its default."""
    shape: dict[str, int] = {}
    for key, default in defaults.items():
        shape[key] = given.get(key, shape[default] if isinstance(default, str) else default)
    return shape
