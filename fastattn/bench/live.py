"""The live display: a table that grows, a progress bar, the time that is left. Needs rich."""

from __future__ import annotations

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
    TimeRemainingColumn,
)
from rich.table import Table

from fastattn.bench.cells import Cell
from fastattn.bench.display import COLUMNS, PlainWatcher, table_line, verdict_colour
from fastattn.bench.results import Result
from fastattn.bench.summary import summarise

_KEEP_LINES = 16  # of the table while it is live; the whole table is printed at the end


class LiveWatcher(PlainWatcher):
    """Draws on stderr, so that stdout keeps the final table alone."""

    def __init__(self) -> None:
        super().__init__(None)
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
        )
        self.task = self.progress.add_task("starting the providers", total=None)
        self.live = Live(self.progress, console=self.console, transient=True)

    def __enter__(self) -> LiveWatcher:
        self.live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.__exit__(None, None, None)

    def start(self, result: Result, cells: Sequence[Cell]) -> None:
        self.progress.update(self.task, total=len(cells))
        for name, provider in result.providers.items():
            if provider["status"] != "ok":
                self.console.print(f"[yellow]{name}: {provider['status']}: {provider['reason']}")

    def doing(self, cell: Cell, what: str) -> None:
        self.progress.update(self.task, description=f"{cell.name}: {what}")

    def measured(self, result: Result) -> None:
        self.progress.advance(self.task)
        rows = summarise(result)[-_KEEP_LINES:]
        self.live.update(Group(rich_table(rows), self.progress))


def rich_table(rows: Sequence[dict[str, Any]], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in COLUMNS:
        numeric = column in ("ms", "± IQR/2", "GFLOP/s", "% of peak", "peak MB", "max error")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    previous = None
    for row in rows:
        line = table_line(row)
        head = line[:3]
        if head == previous:
            line[:3] = ["", "", ""]
        elif previous is not None:
            table.add_section()
        previous = head
        table.add_row(*line, style=verdict_colour(row))
    return table
