"""From raw rounds to rows of a table, and the text of progress lines, tables and conditions.

The metrics are computed from the undisturbed rounds.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastattn.bench import ops, results
from fastattn.bench.cells import Cell, options_in_words
from fastattn.bench.machine import KIND_OF_DTYPE, KINDS, words_of
from fastattn.bench.results import CellResult, Result, Round

# Data of this many times the size of the last-level cache is counted as read from memory.
_BEYOND_CACHES = 2
# ARM features that the measured peak does not use; with them, a rate beyond it is possible.
_FASTER_UNITS = {"bf16": {"bf16", "sve"}, "fp16": {"asimd"}}
# A core's tiles of AMX multiply 32 times as much bf16 in a cycle as its two units multiply and add
# fp32, and a product of fp32 on them is at least three of bf16.
_FP32_ON_TILES = 32 / 3
# The columns of a row: the cell and the outcome, then columns that are None unless it was timed.
_COLUMNS = (
    "op preset label shape device dtype pass mask weights option provider status reason max_error "
    "relative_error bound peak_mb rounds discarded busy ms ms_q1 ms_q3 ms_low ms_high gflops "
    "peak_gflops percent_of_peak percent_low percent_high impossible gbs percent_of_bandwidth "
    "baseline speedup speedup_low speedup_high comparable "
    "verdict items_per_second item attention_share speedup_limit"
).split()

Row = dict[str, Any]


def summarise(result: Result) -> list[Row]:
    """One flat row per cell and provider. Missing values are None."""
    usual = results.usual_states(result.cells)
    return [row for cell in result.cells for row in rows_of(result, cell, usual)]


def rows_of(result: Result, measured: CellResult, usual: Mapping[str, results.Usual]) -> list[Row]:
    """The rows of one cell."""
    cell, baseline, rows = measured.cell, result.settings["baseline"], []
    for provider, outcome in measured.outcomes.items():
        row = {name: getattr(cell, name, getattr(outcome, name, None)) for name in _COLUMNS}
        peak_mb = None if outcome.peak_bytes is None else outcome.peak_bytes / 1e6
        row |= {"pass": cell.passes, "provider": provider, "peak_mb": peak_mb}
        # With too few undisturbed rounds all of them count, and the row is marked as busy.
        timed = [turn for turn in measured.rounds if provider in turn.ms]
        kept = [turn for turn in results.quiet_rounds(measured.rounds) if provider in turn.ms]
        busy = len(kept) < results.MIN_KEPT
        used = timed if busy else kept
        if outcome.ok and used:
            row |= {"rounds": len(used), "discarded": len(timed) - len(used), "busy": busy}
            row |= {"baseline": baseline, **_metrics(result, measured, used, provider)}
            if provider != baseline:
                row |= results.speedup(measured.rounds, baseline, provider, usual) or {}
        rows.append(row)
    return rows


def _metrics(result: Result, measured: CellResult, rounds: list[Round], provider: str) -> Row:
    samples = [turn.ms[provider] for turn in rounds]
    ms, (low, high) = results.median(samples), results.median_interval(samples)
    metrics: Row = {
        "ms": ms,
        "ms_low": low,
        "ms_high": high,
        "gflops": measured.flops / ms / 1e6,
        "ms_q1": results.quantile(samples, 0.25),
        "ms_q3": results.quantile(samples, 0.75),
        "gbs": measured.bytes_touched / ms / 1e6,
    }
    # Other machines of a host share its memory, so the bandwidth varies within a run. Files without
    # measurements beside the rounds have the best of the run.
    bandwidth = result.peaks.get("read_bandwidth")
    read = [turn.read or (bandwidth.rate if bandwidth else 0.0) for turn in rounds]
    if is_from_memory(result, measured) and min(read) > 0:
        size = measured.bytes_touched / 1e4
        shares = [size / x / of for x, of in zip(samples, read, strict=True)]
        metrics["percent_of_bandwidth"] = results.median(shares)
    if KIND_OF_DTYPE[measured.cell.dtype] in result.peaks:
        peaks = [turn.peak for turn in rounds]
        percents = [measured.flops / x / 1e4 / peak for x, peak in zip(samples, peaks, strict=True)]
        low, high = results.median_interval(percents)
        metrics["peak_gflops"] = results.median(peaks)
        metrics["percent_of_peak"] = results.median(percents)
        metrics["percent_low"], metrics["percent_high"] = low, high
        metrics["impossible"] = low > _highest_percent(result, measured)
    if (items := ops.get(measured.cell.op).items(measured.cell)) is not None:
        metrics["items_per_second"], metrics["item"] = items[0] / ms * 1e3, items[1]
    # For a whole model: the share of attention, and the speed-up if it took no time (Amdahl 1967).
    if attention := [turn.attention[provider] for turn in rounds if provider in turn.attention]:
        metrics["attention_share"] = share = results.median(attention)
        metrics["speedup_limit"] = 1 / (1 - share) if share < 1 else None
    return metrics


def is_from_memory(result: Result, measured: CellResult) -> bool:
    """Whether data is read from memory, because it is much larger than the caches."""
    return measured.bytes_touched > _BEYOND_CACHES * result.environment["last_cache"]


def _highest_percent(result: Result, measured: CellResult) -> float:
    """The highest share of the measured peak that a correct measurement can reach."""
    dtype, flags = measured.cell.dtype, set(result.environment["cpu_flags"])
    is_measured = result.peaks[KIND_OF_DTYPE[dtype]].method == "measured"
    if not is_measured or flags & _FASTER_UNITS.get(dtype, set()):
        return float("inf")
    return 100 * (_FP32_ON_TILES if dtype == "fp32" and "amx_bf16" in flags else 1)


# The columns that identify a row, and the columns of each metric.
HEAD = ("cell", "dtype", "pass", "provider")
METRICS = {
    "time": ("ms", "±"),
    "gflops": ("GFLOP/s",),
    "peak": ("% of peak",),
    "gbs": ("GB/s",),
    "memory": ("peak MB",),
    "error": ("rel. error",),
    "speedup": ("speed-up",),
    "rate": ("per second",),
    "attention": ("attention", "by it at most"),
}
DEFAULT_METRICS = ("time", "gflops", "peak", "memory", "error", "speedup")
# For whole models: also the share of time in attention, and the largest possible speed-up.
MODEL_METRICS = ("time", "rate", "memory", "error", "attention", "speedup")
# For steps of a server, which are bound by memory or arithmetic.
STEP_METRICS = ("time", "rate", "peak", "memory", "error", "speedup")
# The columns with a number of the row.
_NUMBERS = {
    "GFLOP/s": ("gflops", "{:.0f}"),
    "GB/s": ("gbs", "{:.1f}"),
    "peak MB": ("peak_mb", "{:.1f}"),
    "rel. error": ("relative_error", "{:.1e}"),
    "attention": ("attention_share", "{:.1%}"),
    "by it at most": ("speedup_limit", "{:.2f}×"),
}
_FINE = ("ok", "UNAVAILABLE", "SKIPPED")  # any other status is a fault


def default_metrics(cells: Sequence[Cell]) -> Sequence[str]:
    if all(cell.op in ops.MODELS for cell in cells):
        return MODEL_METRICS
    return STEP_METRICS if all(ops.get(cell.op).items(cell) for cell in cells) else DEFAULT_METRICS


def progress(result: Result, measured: CellResult, total: int) -> str:
    """A line about the cell that was measured last."""
    rows = rows_of(result, measured, results.usual_states(result.cells))
    outcomes = "; ".join(f"{row['provider']} {_short(row)}" for row in rows)
    return f"[{len(result.cells)}/{total}] {measured.cell.name}: {outcomes}"


def _short(row: Row) -> str:
    if row["ms"] is None:
        return f"{row['status']} ({row['reason']})" if row["reason"] else row["status"]
    speedup = "" if row["speedup"] is None else f", {row['speedup']:.2f}×"
    return f"{milliseconds(row['ms'])} ms{speedup}"


def milliseconds(ms: float) -> str:
    """Three significant digits; the spread does not justify more."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def cell_words(row: Row) -> str:
    options = options_in_words(row["mask"], row["weights"], row["option"])
    return " ".join([row["op"], row["shape"], *options])


def _texts(row: Row) -> dict[str, str]:
    """The text of every column of METRICS."""
    texts = dict.fromkeys(("±", "% of peak", "per second"), "") | {
        column: "" if row[key] is None else form.format(row[key])
        for column, (key, form) in _NUMBERS.items()
    }
    if row["ms"] is None:  # the result file has the complete reason
        return texts | {"ms": row["status"], "speed-up": textwrap.shorten(row["reason"], 160)}
    percent, bandwidth = row["percent_of_peak"], row["percent_of_bandwidth"]
    share = "" if percent is None else f"{percent:.0f}"
    if bandwidth is not None and bandwidth > (percent or 0):
        share = f"{bandwidth:.0f} (read)"
    rate, speedup = row["items_per_second"], row["speedup"]
    against = "baseline" if row["provider"] == row["baseline"] else ""
    if speedup is not None:
        interval = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        against = f"{speedup:.2f}× {interval} {row['verdict']}"
    return texts | {
        "ms": ("busy " if row["busy"] else "") + milliseconds(row["ms"]),
        "±": f"{50 * (row['ms_q3'] - row['ms_q1']) / row['ms']:.0f} %",
        "% of peak": f"{share} IMPOSSIBLE" if row["impossible"] else share,
        "per second": "" if rate is None else f"{milliseconds(rate)} {row['item']}",
        "speed-up": against,
    }


def lines(rows: Sequence[Row], metrics: Sequence[str] = DEFAULT_METRICS) -> list[list[str]]:
    """The headings and the rows. A cell is named once: its model, if any, above its shape."""
    columns = [column for metric in metrics for column in METRICS[metric]]
    printed = [[*HEAD, *columns]]
    for (label, cell, dtype, passes), group in itertools.groupby(
        rows, lambda row: (row["label"], cell_words(row), row["dtype"], row["pass"])
    ):
        of_cell = list(group)
        names = [f"{label} {cell}".strip()] if len(of_cell) == 1 else [label, cell]
        names = [name for name in names if name] + [""] * len(of_cell)
        for place, (row, name) in enumerate(zip(of_cell, names, strict=False)):
            texts = _texts(row)
            head = [name, *(("", "") if place else (dtype, passes)), row["provider"]]
            printed.append(head + [texts[column] for column in columns])
    return printed


def table(rows: Sequence[Row], metrics: Sequence[str] = DEFAULT_METRICS) -> str:
    """The rows as a Markdown table whose columns are aligned."""
    head, *body = ([text.replace("|", "\\|") for text in line] for line in lines(rows, metrics))
    widths = [max(3, *map(len, column)) for column in zip(head, *body, strict=True)]
    padded = (
        [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        for line in (head, ["-" * width for width in widths], *body)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def page(result: Result, rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """The table, the summary and the conditions of a result, in Markdown."""
    shown = [row for row in rows if row["status"] != "SKIPPED"]
    summary = "\n".join(closing(result, rows))
    return f"{table(shown, metrics)}\n\n{summary}\n\n{conditions(result)}\n"


def conditions(result: Result) -> str:
    """The conditions of a result in one paragraph, to print below a table or plot."""
    env, settings = result.environment, result.settings
    peaks = [words_of(kind, result.peaks[kind]) for kind in KINDS if kind in result.peaks]
    threads = settings["threads"]
    rates = f" Best rates of this machine in the same run: {'; '.join(peaks)}." if peaks else ""
    return (
        f"{env.get('gpu') or env['cpu']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"fastattn {env['fastattn']} ({env['isa'] or 'native core not built'}), "
        f"torch {env['torch']}. Medians of interleaved rounds, {settings.get('cache', 'warm')} "
        f"caches; × is the median ratio to {settings['baseline']} within a round.{rates}"
    )


def closing(result: Result, rows: Sequence[Row]) -> list[str]:
    """A summary of the run, in sentences."""
    compared = [row for row in rows if row["speedup"] is not None]
    sentences = []
    for provider in dict.fromkeys(row["provider"] for row in compared):
        ours = [row for row in compared if row["provider"] == provider]
        count = Counter(row["verdict"] for row in ours)
        ratios = sorted(row["speedup"] for row in ours)
        sentences.append(
            f"{provider} against {ours[0]['baseline']}: "
            f"{count['FASTER']} of {len(ours)} cells faster, {count['SLOWER']} slower, "
            f"{count['SAME']} the same, {count['UNSURE']} unsure; "
            f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×, median {ratios[len(ratios) // 2]:.2f}×."
        )
    faults = Counter(f"{row['provider']} {row['status']}" for row in rows if is_fault(row))
    sentences += [f"{key} in {count} cell{'s' * (count > 1)}." for key, count in faults.items()]
    is_complete = result.ended == "complete"
    counts = {
        "IMPOSSIBLE: faster than the peak measured beside it. A time, a count of operations or the "
        "peak is wrong.": [row["impossible"] for row in rows],
        "cells were not measured: the time budget was used up (--time-budget).": [
            is_complete and was_skipped(measured) for measured in result.cells
        ],
        "samples of busy rounds are left out of ms, GFLOP/s and % of peak.": [
            row["discarded"] for row in rows
        ],
        "rows are busy: something else used the cores in most of their rounds, so do not trust "
        "their ms, GFLOP/s and % of peak.": [row["busy"] for row in rows],
        "speed-ups are of disturbed rounds, so their intervals are wide.": [
            not row["comparable"] for row in compared
        ],
    }
    sentences += [f"{sum(x or 0 for x in of)} {words}" for words, of in counts.items() if any(of)]
    right = sum(row["max_error"] is not None and row["status"] != "WRONG" for row in rows)
    sentences.append(f"{right} results were compared with fp64 before being timed, and are right.")
    if not is_complete:
        sentences.append(f"The run was {result.ended}; these are the cells measured until then.")
    return sentences


def is_fault(row: Row) -> bool:
    return row["status"] not in _FINE


def was_skipped(cell: CellResult) -> bool:
    return all(outcome.status == "SKIPPED" for outcome in cell.outcomes.values())
