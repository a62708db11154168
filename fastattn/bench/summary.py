"""From raw rounds to rows of a table: computes the metrics from the rounds that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastattn.bench import ops, stats
from fastattn.bench.cells import options_in_words
from fastattn.bench.peaks import kind_of
from fastattn.bench.results import CellResult, Peak, Result, Round
from fastattn.bench.rounds import MIN_KEPT, Usual, peak_beside, quiet_rounds, speedup, usual_states

# Data of this many times the size of the last-level cache is counted as read from memory.
_BEYOND_CACHES = 2
_CACHE_OF_OLD_FILES = 32 << 20
# ARM features that the measured peak does not use; with them, a rate beyond it is possible.
_FASTER_UNITS = {"bf16": ("bf16", "sve"), "fp16": ("asimd",)}
# A core's tiles of AMX multiply 32 times as much bf16 in a cycle as its two units multiply and add
# fp32, and a product of fp32 on them is at least three of bf16.
_FP32_ON_TILES = 32 / 3


Row = dict[str, Any]


def kept_rounds(result: Result) -> list[list[float]]:
    """The samples used, in milliseconds, for each row of `summarise`."""
    return [
        [r.ms[provider] for r in _used(cell, provider)[0]]
        for cell in result.cells
        for provider in cell.outcomes
    ]


def _used(cell: CellResult, provider: str) -> tuple[list[Round], int, bool]:
    """The rounds of a provider that count, the number of discarded ones, and whether it is busy.

    With too few undisturbed rounds all of them count, and the row is marked as busy.
    """
    timed = [r for r in cell.rounds if provider in r.ms]
    kept = [r for r in quiet_rounds(cell.rounds) if provider in r.ms]
    if len(kept) < MIN_KEPT:
        return timed, 0, True
    return kept, len(timed) - len(kept), False


def summarise(result: Result) -> list[Row]:
    """One flat row per cell and provider. Missing values are None."""
    usual = usual_states(result.cells)
    return [
        _row(result, cell, provider, usual) for cell in result.cells for provider in cell.outcomes
    ]


def _row(
    result: Result, cell: CellResult, provider: str, usual: Mapping[str, Usual]
) -> dict[str, Any]:
    outcome = cell.outcomes[provider]
    row: dict[str, Any] = {
        "op": cell.cell.op,
        "preset": cell.cell.preset,
        "label": cell.cell.label,
        "shape": cell.cell.shape,
        "length": _length(cell.cell.sizes),
        "family": ",".join(part for part in cell.cell.shape.split(",") if part[0] not in "LN"),
        "device": cell.cell.device,
        "dtype": cell.cell.dtype,
        "pass": cell.cell.passes,
        "mask": cell.cell.mask,
        "weights": cell.cell.weights,
        "option": cell.cell.option,
        "provider": provider,
        "status": outcome.status,
        "reason": outcome.reason,
        "max_error": outcome.max_error,
        "relative_error": (
            outcome.max_error / outcome.largest
            if outcome.max_error is not None and outcome.largest
            else None
        ),
        "bound": outcome.bound,
        "peak_mb": None if outcome.peak_bytes is None else outcome.peak_bytes / 1e6,
        **dict.fromkeys(_TIMED),
    }
    used, discarded, busy = _used(cell, provider)
    if outcome.status == "ok" and used:
        row |= {"rounds": len(used), "discarded": discarded, "busy": busy}
        row |= _metrics(result, cell, used, provider)
        row["baseline"] = baseline = result.settings["baseline"]
        if provider != baseline:
            row |= speedup(cell.rounds, baseline, provider, usual) or {}
    return row


def option_words(row: Row) -> list[str]:
    """The mask, weights and option of a row, without those that are "none"."""
    return options_in_words(row["mask"], row["weights"], row["option"])


def _length(sizes: Mapping[str, int]) -> int:
    """The length of the sequence or memory: the x-axis of the plots."""
    return next((sizes[key] for key in ("Lk", "L", "N") if key in sizes), 1)


_TIMED = (
    *("rounds", "discarded", "busy", "ms", "ms_q1", "ms_q3", "ms_low", "ms_high"),
    *("gflops", "peak_gflops", "percent_of_peak", "percent_low", "percent_high", "impossible"),
    *("gbs", "percent_of_bandwidth", "intensity", "roof_gflops", "percent_of_roof"),
    *("baseline", "speedup", "speedup_low", "speedup_high", "comparable", "verdict"),
    *("items_per_second", "item", "attention_share", "speedup_limit"),
)


def _metrics(
    result: Result, cell: CellResult, rounds: list[Round], provider: str
) -> dict[str, Any]:
    samples = [r.ms[provider] for r in rounds]
    ms = stats.median(samples)
    low, high = stats.median_interval(samples)
    gflops = cell.flops / ms / 1e6
    gbs = cell.bytes_touched / ms / 1e6
    metrics: dict[str, Any] = {
        "ms": ms,
        "ms_q1": stats.quantile(samples, 0.25),
        "ms_q3": stats.quantile(samples, 0.75),
        "ms_low": low,
        "ms_high": high,
        "gflops": gflops,
        "gbs": gbs,
    }
    peak = result.peaks.get(kind_of(cell.cell.dtype, result.peaks))
    beside = stats.median([peak_beside(r) for r in rounds])
    if peak is not None:
        percents = [cell.flops / r.ms[provider] / 1e4 / peak_beside(r) for r in rounds]
        metrics["peak_gflops"] = beside
        metrics["percent_of_peak"] = stats.median(percents)
        low, high = stats.median_interval(percents)
        metrics["percent_low"], metrics["percent_high"] = low, high
        highest = 100 * _above_peak(result, cell)
        metrics["impossible"] = low > highest and _is_ceiling(result, cell, peak)
    bandwidth = result.peaks.get("read_bandwidth")
    metrics["intensity"] = cell.flops / cell.bytes_touched
    # Other machines of a host share its memory, so the bandwidth varies within a run. Files without
    # measurements beside the rounds have the best of the run.
    read = [r.read or (0.0 if bandwidth is None else bandwidth.rate) for r in rounds]
    from_memory = is_from_memory(result, cell) and min(read) > 0
    if from_memory:
        metrics["percent_of_bandwidth"] = stats.median(
            [
                cell.bytes_touched / r.ms[provider] / 1e4 / x
                for r, x in zip(rounds, read, strict=True)
            ]
        )
    if peak is not None:
        metrics["roof_gflops"] = roof = beside
        if from_memory:
            metrics["roof_gflops"] = roof = min(roof, stats.median(read) * metrics["intensity"])
        metrics["percent_of_roof"] = 100 * gflops / roof
    return metrics | _of_model(cell, rounds, provider, ms)


def _of_model(cell: CellResult, rounds: list[Round], provider: str, ms: float) -> dict[str, Any]:
    """Items per second; for a whole model, also the share of its time that attention takes.

    speedup_limit   the speed-up of the model if its attention took no time (Amdahl 1967)
    """
    found: dict[str, Any] = {}
    if (items := ops.get(cell.cell.op).items(cell.cell)) is not None:
        found["items_per_second"], found["item"] = items[0] / ms * 1e3, items[1]
    if shares := [r.attention[provider] for r in rounds if provider in r.attention]:
        found["attention_share"] = share = stats.median(shares)
        found["speedup_limit"] = 1 / (1 - share) if share < 1 else None
    return found


def is_from_memory(result: Result, cell: CellResult) -> bool:
    """Whether data is read from memory: caches are flushed, or are much smaller than the data."""
    cache = result.environment.get("last_cache", _CACHE_OF_OLD_FILES)
    return result.settings.get("cache") == "cold" or cell.bytes_touched > _BEYOND_CACHES * cache


def _above_peak(result: Result, cell: CellResult) -> float:
    """How many times the measured peak a right measurement can reach."""
    tiles = cell.cell.dtype == "fp32" and "amx_bf16" in result.environment["cpu_flags"]
    return _FP32_ON_TILES if tiles else 1


def _is_ceiling(result: Result, cell: CellResult, peak: Peak) -> bool:
    faster = _FASTER_UNITS.get(cell.cell.dtype, ())
    return peak.method == "measured" and not set(faster) & set(result.environment["cpu_flags"])
