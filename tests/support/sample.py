"""The part of a product of cases, dtypes and instruction sets that `make test` runs.

A fault depends on one option or on two that meet, hardly ever on three (Kuhn, Wallace and Gallo,
"Software fault interactions and implications for software testing", 2004). So the sample of a
test marked `sampled` covers every pair of values that occurs in any of its rows: values of
parameters, and of fields of a case that differ from the default. `sampled(1)` covers every single
value. Other tests that are parametrized by backend or instruction set take these in turn: every
combination of the other parameters runs, on one of them. `--complete` runs all tests.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest

# Fixtures of conftest.py that choose the backend.
WHO = ("backend", "choice", "engine", "target")


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run the complete products of cases, and what is marked `complete`"
    parser.addoption("--complete", action="store_true", help=about)


def _is_sampled(config: pytest.Config) -> bool:
    """Whether only a sample runs: not if a test is named on the command line."""
    return not (config.option.complete or any("::" in argument for argument in config.args))


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drop parameters that only the complete run has, before pytest makes tests of them."""
    if not metafunc._calls or not _is_sampled(metafunc.config):
        return
    if metafunc.definition.get_closest_marker("complete"):
        calls = []
    else:
        calls = [c for c in metafunc._calls if all(mark.name != "complete" for mark in c.marks)]
    rows = [call.params for call in calls]
    if rows and (marker := metafunc.definition.get_closest_marker("sampled")):
        kept = sample(rows, *marker.args, **marker.kwargs)
    elif rows and any(name in rows[0] for name in WHO):
        kept = sample([_who_and_what(row) for row in rows], 1)
    else:
        kept = set(range(len(rows)))
    # Without any call, pytest would make a test without parameters, so the first call stays; it
    # is deselected below.
    metafunc._calls[:] = [calls[n] for n in sorted(kept)] or metafunc._calls[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are marked `complete`."""
    if not _is_sampled(config):
        return
    left = [item for item in items if item.get_closest_marker("complete")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("complete")]


def _who_and_what(row: Mapping[str, Any]) -> dict[str, str]:
    """The case of a row ("who") and its other values ("what"), as text."""
    return {
        "who": str([row[name] for name in WHO if name in row]),
        "what": str([id(value) for name, value in row.items() if name not in WHO]),
    }


def sample(
    rows: Sequence[Mapping[str, Any]], strength: int = 2, keep: Sequence[str] = ()
) -> set[int]:
    """Return the indices of few rows that cover every combination of ``strength`` values.

    Greedy: always the row with the most new combinations. Ties are broken at random, so that
    neighbours in a table differ in their dtypes and instruction sets.

    Args:
        rows: parameters, by name.
        strength: 1 for single values, 2 for pairs.
        keep: names of cases that stay in all rows, because a mutant survives the others.
    """
    numbers: dict[Hashable, int] = {}
    known: dict[tuple[str, int], set[tuple[str, str]]] = {}  # many rows have the same case
    found = []
    for row in rows:
        for name, value in row.items():
            if (name, id(value)) not in known:
                known[name, id(value)] = _values(name, value)
        values = sorted(set().union(*(known[name, id(value)] for name, value in row.items())))
        groups = [group for n in range(strength) for group in combinations(values, n + 1)]
        groups.append(tuple(str(row[name]) for name in ("dtype", *WHO) if name in row))
        found.append({numbers.setdefault(group, len(numbers)) for group in groups})
    # A row's number of new combinations only decreases: a row still first after its update is best.
    shuffled = [zlib.crc32(str(n).encode()) for n in range(len(rows))]
    queue = [(-len(groups), shuffled[n], n) for n, groups in enumerate(found)]
    heapq.heapify(queue)
    kept = {n for n, row in enumerate(rows) if getattr(row.get("case"), "name", "") in keep}
    missing = set(range(len(numbers))).difference(*(found[n] for n in kept))
    while missing:
        *_, n = heapq.heappop(queue)
        found[n] &= missing
        entry = (-len(found[n]), shuffled[n], n)
        if queue and entry > queue[0]:
            heapq.heappush(queue, entry)
        else:
            missing -= found[n]
            kept.add(n)
    return kept


def _values(name: str, value: Any) -> set[tuple[str, str]]:
    """The parameter with its value; for a case, each field that differs from its default."""
    if is_dataclass(value) and any(field.default is not MISSING for field in fields(value)):
        given = {x.name: (getattr(value, x.name), x.default) for x in fields(value)}
        changed = {x: own for x, (own, default) in given.items() if own != default}
        return {(f"{name}.{x}", str(own)) for x, own in changed.items() if x != "name"}
    return set() if name == "seed" else {(name, str(value))}  # a seed numbers the rows
