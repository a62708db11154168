"""The live display: a growing table, a progress bar and the remaining time. Needs rich."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from fastattn.bench.cells import Cell
from fastattn.bench.display import COLUMNS, PlainWatcher, remaining, table_line, verdict_colour
from fastattn.bench.results import Result
from fastattn.bench.summary import summarise

_WIDE = 130
_ONLY_WHEN_WIDE = ("±", "GFLOP/s", "peak MB", "rel. error")
_REDRAW_SECONDS = 0.25
_KEEP_LINES = 16  # of the live table; the complete table is printed at the end


class LiveWatcher(PlainWatcher):
    """Draws on stderr; stdout gets only the final table."""

    def __init__(self) -> None:
        super().__init__(None)
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self.task = self.progress.add_task("starting the providers", total=None, left="")
        # Drawn only between samples: a thread that draws would disturb the timing.
        self.live = Live(self.progress, console=self.console, transient=True, auto_refresh=False)
        self.drawn = 0.0

    def __enter__(self) -> LiveWatcher:
        self.live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.__exit__(None, None, None)

    def start(self, result: Result, cells: Sequence[Cell]) -> None:
        super().start(result, cells)
        self.progress.update(self.task, total=len(cells))
        for name, provider in result.providers.items():
            if provider["status"] != "ok":
                self.console.print(f"[yellow]{name}: {provider['status']}: {provider['reason']}")

    def doing(self, cell: Cell, what: str) -> None:
        self.progress.update(self.task, description=f"{cell.name}: {what}")
        if time.monotonic() - self.drawn > _REDRAW_SECONDS:
            self.drawn = time.monotonic()
            self.live.refresh()

    def measured(self, result: Result) -> None:
        done = len(result.cells)
        left = remaining(self.began, done, self.total, result.settings["time_budget"])
        self.progress.update(self.task, completed=done, left=f"{left} left")
        rows = summarise(result)[-_KEEP_LINES:]
        table = rich_table(rows, self.console.width)
        self.live.update(Group(table, self.progress), refresh=True)


def rich_table(
    rows: Sequence[dict[str, Any]], width: int, columns: Sequence[str] = COLUMNS
) -> Table:
    """The rows as a table; a narrow terminal gets fewer columns (the files have all)."""
    narrow = width < _WIDE and tuple(columns) == COLUMNS
    shown = [c for c in columns if not (narrow and c in _ONLY_WHEN_WIDE)]
    table = Table(header_style="bold", pad_edge=False)
    for column in shown:
        numeric = column not in ("cell", "dtype", "pass", "provider", "speed-up")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    previous, shape = None, ""
    for row in rows:
        line = table_line(row)
        head = (line["cell"], line["dtype"], line["pass"])
        if head == previous:  # the shape of a cell with a label is below it
            line |= {"cell": shape, "dtype": "", "pass": ""}
            shape = ""
        else:
            if previous is not None:
                table.add_section()
            shape = line["cell"] if row["label"] else ""
            line["cell"] = row["label"] or line["cell"]
        previous = head
        table.add_row(*(line[column] for column in shown), style=verdict_colour(row))
    return table
