"""Progress and results on a terminal: live with rich, line by line without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastattn.bench.display import (
    DEFAULT_METRICS,
    PlainWatcher,
    closing,
    columns_of,
    conditions,
    plain_table,
)
from fastattn.bench.results import Result
from fastattn.bench.summary import Row

__all__ = ["make_watcher", "print_result"]


def make_watcher(quiet: bool = False) -> PlainWatcher:
    """The live display on a terminal if rich is installed; else plain lines, or none if `quiet`."""
    if quiet:
        return PlainWatcher(None)
    if sys.stderr.isatty():
        try:
            from fastattn.bench.live import LiveWatcher

            return LiveWatcher()
        except ImportError:
            pass
    return PlainWatcher(sys.stderr)


def print_result(
    result: Result, rows: Sequence[Row], metrics: Sequence[str] = DEFAULT_METRICS
) -> None:
    """Prints the table, its summary and its conditions to stdout."""
    shown = [row for row in rows if row["status"] != "SKIPPED"]
    try:
        from rich.console import Console

        from fastattn.bench.live import rich_table
    except ImportError:
        print(plain_table(shown, columns_of(metrics)))
    else:
        # A file has no width.
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(rich_table(shown, console.width, columns_of(metrics)))
    print("\n".join(closing(result, rows)))
    print(conditions(result))
