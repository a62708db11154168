"""Progress and tables on a terminal: live with rich, line by line without it."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from fastattn.bench.cells import Cell
from fastattn.bench.results import CellResult, Result
from fastattn.bench.summary import summarise

Row = dict[str, Any]
COLUMNS = (
    *("cell", "dtype", "pass", "provider", "ms", "± IQR/2", "GFLOP/s", "% of peak"),
    *("peak MB", "rel. error", "speed-up"),
)
_COLOURS = {"FASTER": "green", "SLOWER": "red", "SAME": "default", "UNSURE": "yellow"}


def make_watcher(quiet: bool = False) -> PlainWatcher:
    """The live display on a terminal with rich installed; else lines, or nothing when `quiet`."""
    if quiet:
        return PlainWatcher(None)
    if sys.stderr.isatty():
        try:
            from fastattn.bench.live import LiveWatcher

            return LiveWatcher()
        except ImportError:
            pass
    return PlainWatcher(sys.stderr)


class PlainWatcher:
    """One line for each cell that is done."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.total = 0
        self.began = 0.0

    def __enter__(self) -> PlainWatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def start(self, result: Result, cells: Sequence[Cell]) -> None:
        self.total, self.began = len(cells), time.monotonic()
        for name, provider in result.providers.items():
            if provider["status"] != "ok":
                self._say(f"{name}: {provider['status']}: {provider['reason']}")

    def doing(self, cell: Cell, what: str) -> None:
        pass

    def measured(self, result: Result) -> None:
        if was_skipped(result.cells[-1]):
            return
        done = len(result.cells)
        left = remaining(self.began, done, self.total, result.settings["time_budget"])
        name = result.cells[-1].cell.name
        rows = summarise(result)[-len(result.cells[-1].outcomes) :]
        told = "; ".join(f"{row['provider']} {short(row)}" for row in rows)
        self._say(f"[{done}/{self.total}, {left} left] {name}: {told}")

    def _say(self, text: str) -> None:
        if self.stream is not None:
            print(text, file=self.stream, flush=True)


def was_skipped(cell: CellResult) -> bool:
    return all(outcome.status == "SKIPPED" for outcome in cell.outcomes.values())


def remaining(began: float, done: int, total: int, budget: float) -> str:
    """How long the run will still take: as long for each cell as so far, within its budget."""
    elapsed = time.monotonic() - began
    seconds = max(0.0, min(elapsed / max(done, 1) * (total - done), budget - elapsed))
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def short(row: Row) -> str:
    """A row in a few words."""
    if row["ms"] is None:
        return f"{row['status']} ({row['reason']})" if row["reason"] else row["status"]
    speedup = "" if row["speedup"] is None else f", {row['speedup']:.2f}×"
    return f"{milliseconds(row['ms'])} ms{speedup}"


def milliseconds(ms: float) -> str:
    """Three significant digits, as many as the spread deserves."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def cell_words(row: Row) -> str:
    words = [row["op"], row["shape"]]
    if row["mask"] != "none":
        words.append(row["mask"])
    if row["weights"] != "none":
        words.append(f"{row['weights']} weights")
    return " ".join(words)


def table_line(row: Row) -> list[str]:
    """The texts of COLUMNS."""
    head = [cell_words(row), row["dtype"], row["pass"], row["provider"]]
    memory = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
    error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    if row["ms"] is None:
        reason = textwrap.shorten(row["reason"], 160)  # the result file has all of it
        return [*head, row["status"], "", "", "", memory, error, reason]
    percent = "" if row["percent_of_peak"] is None else f"{row['percent_of_peak']:.0f}"
    if row["percent_of_bandwidth"] is not None and row["percent_of_bandwidth"] > (
        row["percent_of_peak"] or 0
    ):
        percent = f"{row['percent_of_bandwidth']:.0f} (read)"
    if row["impossible"]:
        percent += " IMPOSSIBLE"
    speedup = "baseline" if row["provider"] == row["baseline"] else ""
    if row["speedup"] is not None:
        interval = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        speedup = f"{row['speedup']:.2f}× {interval} {row['verdict']}"
    spread = f"{50 * (row['ms_q3'] - row['ms_q1']) / row['ms']:.0f} %"
    if row["busy"]:
        spread += " busy"
    numbers = [milliseconds(row["ms"]), spread, f"{row['gflops']:.0f}", percent]
    return [*head, *numbers, memory, error, speedup]


def plain_table(rows: Sequence[Row]) -> str:
    lines = [list(COLUMNS), *(table_line(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def save_markdown(result: Result, rows: Sequence[Row], path: Path) -> None:
    """The table, what it shows, and its conditions."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(table_line(row) for row in rows)]
    cells = ([text.replace("|", "\\|") for text in line] for line in lines)
    table = "\n".join("| " + " | ".join(line) + " |" for line in cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    told = "\n".join(closing(result, rows))
    path.write_text(f"{table}\n\n{told}\n\n{conditions(result)}\n")


def verdict_colour(row: Row) -> str:
    if row["ms"] is None:
        return "dim" if row["status"] in ("UNAVAILABLE", "SKIPPED") else "bold red"
    return "bold red" if row["impossible"] else _COLOURS.get(row["verdict"] or "", "default")


def conditions(result: Result) -> str:
    """The conditions of a result in one paragraph, for below a table or a picture."""
    env, settings = result.environment, result.settings
    peaks = []
    for kind, unit, words in (
        ("fma_f32", "GFLOP/s", "fp32 FMA"),
        ("dot_bf16", "GFLOP/s", "bf16 dot products"),
        ("read_bandwidth", "GB/s", "reading memory"),
        ("copy_bandwidth", "GB/s", "copying it"),
    ):
        if kind in result.peaks:
            peak = result.peaks[kind]
            note = "" if peak.method == "measured" else f", {peak.method}"
            peaks.append(f"{words} {peak.rate:.0f} {unit}{note}")
    threads = settings["threads"]
    return (
        f"{env['cpu']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"fastattn {env['fastattn']} ({env['isa'] or 'native core not built'}), "
        f"torch {env['torch']}. Medians of interleaved rounds, {settings.get('cache', 'warm')} "
        f"caches; × is the median ratio to {settings['baseline']} within a round. Best rates of "
        f"this machine in the same run: {'; '.join(peaks)}."
    )


def closing(result: Result, rows: Sequence[Row]) -> list[str]:
    """What the run shows, in sentences."""
    lines = []
    compared = [row for row in rows if row["speedup"] is not None]
    for provider in dict.fromkeys(row["provider"] for row in compared):
        ours = [row for row in compared if row["provider"] == provider]
        count = {v: sum(row["verdict"] == v for row in ours) for v in _COLOURS}
        ratios = sorted(row["speedup"] for row in ours)
        lines.append(
            f"{provider} against {ours[0]['baseline']}: "
            f"{count['FASTER']} of {len(ours)} cells faster, {count['SLOWER']} slower, "
            f"{count['SAME'] + count['UNSURE']} the same or unsure; "
            f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×, median {ratios[len(ratios) // 2]:.2f}×."
        )
    faults: dict[str, int] = {}
    for row in rows:
        if row["status"] not in ("ok", "UNAVAILABLE", "SKIPPED"):
            key = f"{row['provider']} {row['status']}"
            faults[key] = faults.get(key, 0) + 1
    lines += [f"{key} in {count} cell{'s' if count > 1 else ''}." for key, count in faults.items()]
    skipped = sum(was_skipped(cell) for cell in result.cells)
    if skipped:
        budget = result.settings["time_budget"]
        lines.append(
            f"{skipped} of {len(result.cells)} cells were not measured: the time budget of "
            f"{budget:.0f} s was used up (--time-budget)."
        )
    discarded = sum(row["discarded"] or 0 for row in rows)
    if discarded:
        lines.append(f"{discarded} samples discarded: the machine was busy with something else.")
    busy = sum(bool(row["busy"]) for row in rows)
    if busy:
        lines.append(f"{busy} rows: the machine was never quiet, do not trust their times.")
    checked = sum(row["max_error"] is not None and row["status"] != "WRONG" for row in rows)
    lines.append(f"{checked} results were compared with fp64 before being timed, and are right.")
    if result.ended != "complete":
        lines.append(f"The run was {result.ended}; this is what it had measured.")
    return lines


def print_result(result: Result, rows: Sequence[Row]) -> None:
    """The final table, what it shows, and its conditions, on stdout."""
    shown = [row for row in rows if row["status"] != "SKIPPED"]
    try:
        from rich.console import Console

        from fastattn.bench.live import rich_table
    except ImportError:
        print(plain_table(shown))
    else:
        # Piped into a file there is no width to keep to.
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(rich_table(shown, console.width))
    print("\n".join(closing(result, rows)))
    print(conditions(result))
