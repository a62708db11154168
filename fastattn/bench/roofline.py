"""The roofline: the limits of arithmetic and memory, and the share of them that a cell reaches."""

from __future__ import annotations

from collections.abc import Sequence

from fastattn.bench.peaks import KIND_OF_DTYPE, KINDS, UNIT_NAMES, measure_peak
from fastattn.bench.results import Peak
from fastattn.bench.summary import Row

_SECONDS = 0.3


def measure(threads: int) -> tuple[dict[str, Peak], float]:
    """Measures every peak; also returns the least share of the cores that it received."""
    peaks, least = {}, 1.0
    for kind in KINDS:
        samples = [measure_peak(kind, threads, _SECONDS) for _ in range(3)]
        rates = [sample.rate for sample in samples]
        peaks[kind] = Peak(max(rates), samples[0].method, rates, samples[0].unit)
        least = min(least, *(sample.share for sample in samples))
    return peaks, least


def roof_lines(peaks: dict[str, Peak]) -> list[str]:
    """The peaks, and the intensity from which arithmetic is the limit."""
    read = peaks["read_bandwidth"].rate
    lines = [f"reading memory  {read:8.1f} GB/s  {_spread(peaks['read_bandwidth'])}"]
    if copy := peaks.get("copy_bandwidth"):
        lines.append(f"copying it      {copy.rate:8.1f} GB/s  {_spread(copy)}")
    for dtype, kind in KIND_OF_DTYPE.items():
        if kind in peaks:
            rate = peaks[kind].rate
            lines.append(
                f"{dtype} arithmetic {rate:8.1f} GFLOP/s  {_spread(peaks[kind])}; the limit from "
                f"{rate / read:.1f} FLOP per byte on"
            )
    return lines


def _spread(peak: Peak) -> str:
    method = f", {UNIT_NAMES[peak.unit]}" if peak.unit in UNIT_NAMES else ""
    method += "" if peak.method == "measured" else f", {peak.method}"
    if not peak.samples:
        return method.removeprefix(", ")
    return f"({min(peak.samples):.1f} to {max(peak.samples):.1f}{method})"


def cell_lines(rows: Sequence[Row]) -> list[str]:
    """The intensity of each row, its limit, and the share of it that it reaches."""
    lines = [f"{'FLOP/byte':>10} {'GFLOP/s':>8} {'roof':>8} {'share':>6}  cell"]
    for row in rows:
        if row["percent_of_roof"] is not None:
            name = f"{row['op']} {row['shape']} {row['dtype']} {row['pass']} {row['provider']}"
            lines.append(
                f"{row['intensity']:10.1f} {row['gflops']:8.1f} {row['roof_gflops']:8.1f} "
                f"{row['percent_of_roof']:4.0f} %  {name}"
            )
    return lines
