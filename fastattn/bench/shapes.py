"""The grammar of `--shapes`: `B=1,H=8,Lq=128:8192:x2,Lk=Lq,D=64`.

    KEY=5             one value
    KEY=1|4|16        several
    KEY=128:8192:x2   from 128 to 8192, doubling;   64:256:+64 adds instead
    KEY=OTHER         the value of another key

A shape with several ranges stands for every combination. `L` sets Lq and Lk at once, `E` the width
H·D.
"""

from __future__ import annotations

import itertools
import re

KEYS = ("B", "H", "Hkv", "L", "Lq", "Lk", "D", "Dv", "E")
MAX_SHAPES = 1000
_RANGE = re.compile(r"(\d+):(\d+):([x+])(\d+)")


def parse_shapes(text: str) -> list[dict[str, int]]:
    """Every combination that `text` describes, each with all of B, H, Hkv, Lq, Lk, D, Dv."""
    given: dict[str, list[int] | str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"--shapes: {part.strip()!r} is not KEY=VALUE; keys are {', '.join(KEYS)}"
            )
        if key not in KEYS:
            raise ValueError(f"--shapes: unknown key {key!r}; keys are {', '.join(KEYS)}")
        if key in given:
            raise ValueError(f"--shapes: {key} is given twice")
        given[key] = value if value in KEYS else _values(key, value)

    ranges = {key: values for key, values in given.items() if not isinstance(values, str)}
    count = 1
    for values in ranges.values():
        count *= len(values)
    if count > MAX_SHAPES:
        raise ValueError(f"--shapes: {count} combinations, at most {MAX_SHAPES} are allowed")
    references = {key: other for key, other in given.items() if isinstance(other, str)}
    return [
        _complete(dict(zip(ranges, combination, strict=True)), references)
        for combination in itertools.product(*ranges.values())
    ]


def _values(key: str, text: str) -> list[int]:
    values: list[int] = []
    for item in text.split("|"):
        match = _RANGE.fullmatch(item)
        if match:
            values += _range(key, item, *match.groups())
        elif item.isdecimal():
            values.append(int(item))
        else:
            raise ValueError(
                f"--shapes: {key}={text} is neither a number, a list 1|2|4, a range FROM:TO:x2 or "
                "FROM:TO:+64, nor another key"
            )
    if min(values) < 1:
        raise ValueError(f"--shapes: {key}={text} must be at least 1")
    return values


def _range(key: str, text: str, first: str, last: str, kind: str, step: str) -> list[int]:
    value, end, by = int(first), int(last), int(step)
    if value < 1 or value > end or by < (2 if kind == "x" else 1):
        raise ValueError(f"--shapes: the range {key}={text} does not go upwards from at least 1")
    values = []
    while value <= end:
        values.append(value)
        value = value * by if kind == "x" else value + by
    return values


def _complete(shape: dict[str, int], references: dict[str, str]) -> dict[str, int]:
    """Resolves references and fills in what was left out."""
    for key, other in references.items():
        if other not in shape:
            raise ValueError(f"--shapes: {key}={other}, but {other} is not given as a number")
        shape[key] = shape[other]
    if "L" in shape and ("Lq" in shape or "Lk" in shape):
        raise ValueError("--shapes: give either L or Lq and Lk")
    heads = shape.setdefault("H", 8)
    if "E" in shape:
        if "D" in shape and shape["D"] * heads != shape["E"]:
            raise ValueError(
                f"--shapes: E={shape['E']} is not H·D = {heads}·{shape['D']}; give either E or D"
            )
        if shape["E"] % heads:
            raise ValueError(f"--shapes: E={shape['E']} is not a multiple of H={heads}")
        shape["D"] = shape["E"] // heads
    length = shape.get("L", shape.get("Lq", shape.get("Lk", 512)))
    head_dim = shape.get("D", 64)
    return {
        "B": shape.get("B", 1),
        "H": heads,
        "Hkv": shape.get("Hkv", heads),
        "Lq": shape.get("Lq", length),
        "Lk": shape.get("Lk", length),
        "D": head_dim,
        "Dv": shape.get("Dv", head_dim),
    }
