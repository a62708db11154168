"""The text of progress lines, tables and conditions."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.peaks import UNIT_NAMES
from fastattn.bench.results import CellResult, Result
from fastattn.bench.summary import Row, option_words, summarise

# The columns that identify a row, and those of each metric.
HEAD = ("cell", "dtype", "pass", "provider")
METRICS = {
    "time": ("ms", "±"),
    "gflops": ("GFLOP/s",),
    "peak": ("% of peak",),
    "gbs": ("GB/s",),
    "roof": ("% of roof",),
    "memory": ("peak MB",),
    "error": ("rel. error",),
    "speedup": ("speed-up",),
    "rate": ("per second",),
    "attention": ("attention", "at most"),
}
DEFAULT_METRICS = ("time", "gflops", "peak", "memory", "error", "speedup")


# For whole models: also the share of time in attention, and the largest possible speed-up.
MODEL_METRICS = ("time", "rate", "memory", "error", "attention", "speedup")
# For steps of a server, whose limit is reading or arithmetic.
STEP_METRICS = ("time", "rate", "peak", "memory", "error", "speedup")


def default_metrics(cells: Sequence[Cell]) -> Sequence[str]:
    if all(cell.op in ops.MODELS for cell in cells):
        return MODEL_METRICS
    return STEP_METRICS if all(ops.get(cell.op).items(cell) for cell in cells) else DEFAULT_METRICS


def columns_of(metrics: Sequence[str]) -> list[str]:
    return [*HEAD, *(column for metric in metrics for column in METRICS[metric])]


_VERDICTS = ("FASTER", "SLOWER", "SAME", "UNSURE")


class Progress:
    """Prints one line per finished cell; None prints nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.total = 0
        self.began = 0.0

    def start(self, result: Result, cells: Sequence[Cell]) -> None:
        self.total, self.began = len(cells), time.monotonic()
        for name, provider in result.providers.items():
            if provider["status"] != "ok":
                self._print(f"{name}: {provider['status']}: {provider['reason']}")

    def measured(self, result: Result) -> None:
        if was_skipped(result.cells[-1]):
            return
        done = len(result.cells)
        left = remaining(self.began, done, self.total, result.settings["time_budget"])
        name = result.cells[-1].cell.name
        rows = summarise(result)[-len(result.cells[-1].outcomes) :]
        outcomes = "; ".join(f"{row['provider']} {short(row)}" for row in rows)
        self._print(f"[{done}/{self.total}, {left} left] {name}: {outcomes}")

    def _print(self, text: str) -> None:
        if self.stream is not None:
            print(text, file=self.stream, flush=True)


def was_skipped(cell: CellResult) -> bool:
    return all(outcome.status == "SKIPPED" for outcome in cell.outcomes.values())


def remaining(began: float, done: int, total: int, budget: float) -> str:
    """The remaining time: as long per cell as so far, within the budget."""
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
    """Three significant digits; the spread does not justify more."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def cell_words(row: Row) -> str:
    return " ".join([row["op"], row["shape"], *option_words(row)])


def table_line(row: Row) -> dict[str, str]:
    """The text of every column."""
    texts = dict.fromkeys(columns_of(tuple(METRICS)), "")
    texts |= {"cell": cell_words(row), **{name: row[name] for name in HEAD[1:]}}
    texts["peak MB"] = _number(row["peak_mb"], ".1f")
    texts["rel. error"] = _number(row["relative_error"], ".1e")
    if row["ms"] is None:
        texts["ms"] = row["status"]
        # The result file has the complete text.
        texts["speed-up"] = textwrap.shorten(row["reason"], 160)
        return texts
    spread = f"{50 * (row['ms_q3'] - row['ms_q1']) / row['ms']:.0f} %"
    speedup = "baseline" if row["provider"] == row["baseline"] else ""
    if row["speedup"] is not None:
        interval = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        speedup = f"{row['speedup']:.2f}× {interval} {row['verdict']}"
    return texts | {
        "ms": ("busy " if row["busy"] else "") + milliseconds(row["ms"]),
        "±": spread,
        "GFLOP/s": f"{row['gflops']:.0f}",
        "GB/s": f"{row['gbs']:.1f}",
        "% of peak": _peak_text(row),
        "% of roof": _number(row["percent_of_roof"], ".0f"),
        "speed-up": speedup,
        "per second": _rate(row),
        "attention": _percent(row["attention_share"]),
        "at most": "" if row["speedup_limit"] is None else f"{row['speedup_limit']:.2f}×",
    }


def _rate(row: Row) -> str:
    rate = row["items_per_second"]
    return "" if rate is None else f"{milliseconds(rate)} {row['item']}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _peak_text(row: Row) -> str:
    percent = _number(row["percent_of_peak"], ".0f")
    bandwidth = row["percent_of_bandwidth"]
    if bandwidth is not None and bandwidth > (row["percent_of_peak"] or 0):
        percent = f"{bandwidth:.0f} (read)"
    return percent + (" IMPOSSIBLE" if row["impossible"] else "")


def plain_table(rows: Sequence[Row], metrics: Sequence[str] = DEFAULT_METRICS) -> str:
    """The rows as aligned text. A cell is named once: its model, if any, above its shape."""
    columns = columns_of(metrics)
    lines = [columns]
    for _, group in itertools.groupby(rows, lambda row: [row["label"], *_cell_of(row)]):
        of_cell = list(group)
        label, words = of_cell[0]["label"], cell_words(of_cell[0])
        names = [f"{label} {words}".strip()] if len(of_cell) == 1 else [label, words]
        names = [name for name in names if name] + [""] * len(of_cell)
        for place, (row, name) in enumerate(zip(of_cell, names, strict=False)):
            text = table_line(row) | {"cell": name}
            text |= {"dtype": "", "pass": ""} if place else {}
            lines.append([text[column] for column in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell_of(row: Row) -> list[str]:
    return [cell_words(row), row["dtype"], row["pass"]]


def print_result(
    result: Result, rows: Sequence[Row], metrics: Sequence[str] = DEFAULT_METRICS
) -> None:
    """Prints the table, its summary and its conditions to stdout."""
    print(plain_table([row for row in rows if row["status"] != "SKIPPED"], metrics))
    print("\n".join([*closing(result, rows), conditions(result)]))


def save_markdown(
    result: Result, rows: Sequence[Row], path: Path, metrics: Sequence[str] = DEFAULT_METRICS
) -> None:
    """Writes the table, its summary and its conditions."""
    texts, columns = [table_line(row) for row in rows], columns_of(metrics)
    lines = [columns, ["---"] * len(columns), *([text[c] for c in columns] for text in texts)]
    cells = ([text.replace("|", "\\|") for text in line] for line in lines)
    table = "\n".join("| " + " | ".join(line) + " |" for line in cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = "\n".join(closing(result, rows))
    path.write_text(f"{table}\n\n{summary}\n\n{conditions(result)}\n")


def conditions(result: Result) -> str:
    """The conditions of a result in one paragraph, to print below a table or plot."""
    env, settings = result.environment, result.settings
    peaks = []
    for kind, unit, words in (
        ("fma_f32", "GFLOP/s", "fp32 FMA"),
        ("dot_bf16", "GFLOP/s", "bf16"),
        ("dot_f16", "GFLOP/s", "fp16"),
        ("read_bandwidth", "GB/s", "reading memory"),
        ("copy_bandwidth", "GB/s", "copying it"),
    ):
        if kind in result.peaks:
            peak = result.peaks[kind]
            if kind.startswith("dot_") and (which := UNIT_NAMES.get(peak.unit or kind)):
                words += f" {which}"
            note = "" if peak.method == "measured" else f", {peak.method}"
            peaks.append(f"{words} {peak.rate:.0f} {unit}{note}")
    threads = settings["threads"]
    return (
        f"{env.get('gpu') or env['cpu']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"fastattn {env['fastattn']} ({env['isa'] or 'native core not built'}), "
        f"torch {env['torch']}. Medians of interleaved rounds, {settings.get('cache', 'warm')} "
        f"caches; × is the median ratio to {settings['baseline']} within a round. Best rates of "
        f"this machine in the same run: {'; '.join(peaks)}."
    )


def closing(result: Result, rows: Sequence[Row]) -> list[str]:
    """A summary of the run, in sentences."""
    lines = []
    compared = [row for row in rows if row["speedup"] is not None]
    for provider in dict.fromkeys(row["provider"] for row in compared):
        ours = [row for row in compared if row["provider"] == provider]
        count = {v: sum(row["verdict"] == v for row in ours) for v in _VERDICTS}
        ratios = sorted(row["speedup"] for row in ours)
        lines.append(
            f"{provider} against {ours[0]['baseline']}: "
            f"{count['FASTER']} of {len(ours)} cells faster, {count['SLOWER']} slower, "
            f"{count['SAME']} the same, {count['UNSURE']} unsure"
            f"{' (whose 95 % interval reaches 1)' if count['UNSURE'] else ''}; "
            f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×, median {ratios[len(ratios) // 2]:.2f}×."
        )
    faults: dict[str, int] = {}
    for row in rows:
        if row["status"] not in ("ok", "UNAVAILABLE", "SKIPPED"):
            key = f"{row['provider']} {row['status']}"
            faults[key] = faults.get(key, 0) + 1
    lines += [f"{key} in {count} cell{'s' if count > 1 else ''}." for key, count in faults.items()]
    if impossible := sum(bool(row["impossible"]) for row in rows):
        lines.append(
            f"{impossible} row{'s' if impossible > 1 else ''} IMPOSSIBLE: faster than the peak "
            "measured beside it. A time, a count of operations or the peak is wrong."
        )
    skipped = sum(was_skipped(cell) for cell in result.cells)
    if skipped and result.ended == "complete":
        budget = result.settings["time_budget"]
        lines.append(
            f"{skipped} of {len(result.cells)} cells were not measured: the time budget of "
            f"{budget:.0f} s was used up (--time-budget)."
        )
    lines += _about_busy_rounds(rows)
    checked = sum(row["max_error"] is not None and row["status"] != "WRONG" for row in rows)
    lines.append(f"{checked} results were compared with fp64 before being timed, and are right.")
    if result.ended != "complete":
        lines.append(f"The run was {result.ended}; these are the cells measured until then.")
    return lines


def _about_busy_rounds(rows: Sequence[Row]) -> list[str]:
    lines = []
    absolute = "ms, GFLOP/s and % of peak"
    if discarded := sum(row["discarded"] or 0 for row in rows):
        lines.append(f"{discarded} samples of busy rounds are left out of {absolute}.")
    if busy := sum(bool(row["busy"]) for row in rows):
        timed = sum(row["ms"] is not None for row in rows)
        lines.append(
            f"{busy} of {timed} rows are busy: something else used the cores in most of their "
            f"rounds, so do not trust {absolute}."
        )
    compared = [row for row in rows if row["speedup"] is not None]
    if disturbed := sum(not row["comparable"] for row in compared):
        lines.append(
            f"{disturbed} of {len(compared)} speed-ups are of disturbed rounds, so their intervals "
            "are wide."
        )
    return lines
