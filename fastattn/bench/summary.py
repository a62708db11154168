"""From raw rounds to rows of a table: computes the metrics from the rounds that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastattn.bench import ops, stats
from fastattn.bench.cells import options_in_words
from fastattn.bench.peaks import KIND_OF_DTYPE
from fastattn.bench.results import CellResult, Result, Round
from fastattn.bench.rounds import MIN_KEPT, Usual, quiet_rounds, speedup, usual_states

# Data of this many times the size of the last-level cache is counted as read from memory.
_BEYOND_CACHES = 2
# ARM features that the measured peak does not use; with them, a rate beyond it is possible.
_FASTER_UNITS = {"bf16": {"bf16", "sve"}, "fp16": {"asimd"}}
# A core's tiles of AMX multiply 32 times as much bf16 in a cycle as its two units multiply and add
# fp32, and a product of fp32 on them is at least three of bf16.
_FP32_ON_TILES = 32 / 3
# The columns of a row that are None unless it was timed.
_TIMED = (
    "rounds discarded busy ms ms_q1 ms_q3 ms_low ms_high gflops peak_gflops percent_of_peak "
    "percent_low percent_high impossible gbs percent_of_bandwidth intensity roof_gflops "
    "percent_of_roof baseline speedup speedup_low speedup_high comparable verdict "
    "items_per_second item attention_share speedup_limit"
).split()

Row = dict[str, Any]


def summarise(result: Result) -> list[Row]:
    """One flat row per cell and provider. Missing values are None."""
    usual = usual_states(result.cells)
    return [row for cell in result.cells for row in rows_of(result, cell, usual)]


def kept_rounds(result: Result) -> list[list[float]]:
    """The samples used, in milliseconds, for each row of `summarise`."""
    return [
        [turn.ms[provider] for turn in _used(cell, provider)[0]]
        for cell in result.cells
        for provider in cell.outcomes
    ]


def _used(cell: CellResult, provider: str) -> tuple[list[Round], int, bool]:
    """The rounds of a provider that count, the number of discarded ones, and whether it is busy.

    With too few undisturbed rounds all of them count, and the row is marked as busy.
    """
    timed = [turn for turn in cell.rounds if provider in turn.ms]
    kept = [turn for turn in quiet_rounds(cell.rounds) if provider in turn.ms]
    return (timed, 0, True) if len(kept) < MIN_KEPT else (kept, len(timed) - len(kept), False)


def rows_of(result: Result, found: CellResult, usual: Mapping[str, Usual]) -> list[Row]:
    """The rows of one cell."""
    cell, baseline, rows = found.cell, result.settings["baseline"], []
    for provider, outcome in found.outcomes.items():
        row: Row = {
            **{name: getattr(cell, name) for name in ("op", "preset", "label", "shape", "device")},
            "dtype": cell.dtype,
            "pass": cell.passes,
            **{name: getattr(cell, name) for name in ("mask", "weights", "option")},
            "provider": provider,
            **{name: getattr(outcome, name) for name in ("status", "reason", "max_error")},
            "relative_error": outcome.relative_error,
            "bound": outcome.bound,
            "peak_mb": None if outcome.peak_bytes is None else outcome.peak_bytes / 1e6,
            **dict.fromkeys(_TIMED),
        }
        used, discarded, busy = _used(found, provider)
        if outcome.ok and used:
            row |= {"rounds": len(used), "discarded": discarded, "busy": busy, "baseline": baseline}
            row |= _metrics(result, found, used, provider)
            if provider != baseline:
                row |= speedup(found.rounds, baseline, provider, usual) or {}
        rows.append(row)
    return rows


def option_words(row: Row) -> list[str]:
    """The mask, weights and option of a row, without those that are "none"."""
    return options_in_words(row["mask"], row["weights"], row["option"])


def _metrics(result: Result, found: CellResult, rounds: list[Round], provider: str) -> Row:
    samples = [turn.ms[provider] for turn in rounds]
    ms, (low, high) = stats.median(samples), stats.median_interval(samples)
    intensity, gflops = found.flops / found.bytes_touched, found.flops / ms / 1e6
    metrics: Row = {
        "ms": ms,
        "ms_low": low,
        "ms_high": high,
        "gflops": gflops,
        "intensity": intensity,
        "ms_q1": stats.quantile(samples, 0.25),
        "ms_q3": stats.quantile(samples, 0.75),
        "gbs": found.bytes_touched / ms / 1e6,
    }
    # Other machines of a host share its memory, so the bandwidth varies within a run. Files without
    # measurements beside the rounds have the best of the run.
    bandwidth = result.peaks.get("read_bandwidth")
    read = [turn.read or (bandwidth.rate if bandwidth else 0.0) for turn in rounds]
    from_memory = is_from_memory(result, found) and min(read) > 0
    if from_memory:
        shares = [found.bytes_touched / x / 1e4 / of for x, of in zip(samples, read, strict=True)]
        metrics["percent_of_bandwidth"] = stats.median(shares)
    if KIND_OF_DTYPE[found.cell.dtype] in result.peaks:
        peaks = [turn.peak for turn in rounds]
        percents = [found.flops / x / 1e4 / peak for x, peak in zip(samples, peaks, strict=True)]
        low, high = stats.median_interval(percents)
        metrics["peak_gflops"] = roof = stats.median(peaks)
        metrics["percent_of_peak"] = stats.median(percents)
        metrics["percent_low"], metrics["percent_high"] = low, high
        metrics["impossible"] = low > _highest_percent(result, found)
        if from_memory:
            roof = min(roof, stats.median(read) * intensity)
        metrics["roof_gflops"], metrics["percent_of_roof"] = roof, 100 * gflops / roof
    if (items := ops.get(found.cell.op).items(found.cell)) is not None:
        metrics["items_per_second"], metrics["item"] = items[0] / ms * 1e3, items[1]
    # Of a whole model: the share of attention, and the speed-up if it took no time (Amdahl 1967).
    if attention := [turn.attention[provider] for turn in rounds if provider in turn.attention]:
        metrics["attention_share"] = share = stats.median(attention)
        metrics["speedup_limit"] = 1 / (1 - share) if share < 1 else None
    return metrics


def is_from_memory(result: Result, found: CellResult) -> bool:
    """Whether data is read from memory: caches are flushed, or are much smaller than the data."""
    cache = result.environment["last_cache"]
    return result.settings.get("cache") == "cold" or found.bytes_touched > _BEYOND_CACHES * cache


def _highest_percent(result: Result, found: CellResult) -> float:
    """The share of the measured peak that a right measurement can reach."""
    dtype, flags = found.cell.dtype, set(result.environment["cpu_flags"])
    is_measured = result.peaks[KIND_OF_DTYPE[dtype]].method == "measured"
    if not is_measured or flags & _FASTER_UNITS.get(dtype, set()):
        return float("inf")
    return 100 * (_FP32_ON_TILES if dtype == "fp32" and "amx_bf16" in flags else 1)
