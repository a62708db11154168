"""The plots of a result: speed-ups, times, the roofline, the budget of calls. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from fastattn.bench import breakdown as parts
from fastattn.bench.display import cell_words, conditions
from fastattn.bench.peaks import kind_of
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, option_words, summarise

# One hue per provider, one shade per dtype; distinct for colour-blind readers, on light and dark.
_HUES = {
    "fastattn": ("#2f81f7", "#86b9fb", "#c0dbfd"),
    "torch": ("#7d8590", "#a9b0b8", "#d0d5da"),
}
_OTHERS = (
    ("#d1742f", "#e8b288", "#f4d9c4"),
    ("#3f9a6c", "#91cbae", "#c8e5d6"),
    ("#a371f7", "#ccb2fa", "#e5d8fd"),
    ("#c9a227", "#e0c878", "#f0e3bb"),
    ("#d6619a", "#e7a2c4", "#f3d0e1"),
    ("#2aa5a0", "#83cbc8", "#c1e5e3"),
)
_DTYPES = ("fp32", "bf16", "fp16")
_MARKERS = "osD^vPX*"
_PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


@dataclass(frozen=True)
class Theme:
    ground: str
    text: str
    faint: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0"),
    "dark": Theme("#0d1117", "#e6edf3", "#3d444d"),
}


def draw(result: Result, path: Path, kind: str = "speedup", theme: str = "light") -> None:
    """Writes one of KINDS; the suffix of the file selects the format."""
    save(make(result, kind, theme), path)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor=figure.get_facecolor())
    plt.close(figure)


def make(result: Result, kind: str, theme: str = "light") -> Figure:
    rows = [row for row in summarise(result) if row["ms"] is not None]
    if not rows:
        raise ValueError("nothing was timed, so there is nothing to plot")
    return KINDS[kind](result, rows, THEMES[theme])


def _figure(look: Theme, width: float, height: float, **more: Any) -> tuple[Figure, Any]:
    size = (width, height)
    return plt.subplots(figsize=size, facecolor=look.ground, layout="constrained", **more)


# Speed-ups


def _speedup(result: Result, rows: Sequence[Row], look: Theme) -> Figure:
    """Two bar charts: times as fast as the baseline, and the share of the peak."""
    baseline = result.settings["baseline"]
    groups = list(dict.fromkeys(_group(row) for row in rows))
    series = list(dict.fromkeys((row["provider"], row["dtype"]) for row in rows))
    series.sort(key=lambda s: (s[0] == baseline, s[0], _DTYPES.index(s[1])))
    compared = [s for s in series if s[0] != baseline]

    bars = len(groups) * max(0.17 * len(compared), 0.1 * len(series), 0.3)
    figure, (left, right) = _figure(
        look, 11, bars * 1.25 + 1.8, ncols=2, sharey=True, width_ratios=(1.15, 1)
    )
    colours = _colours(series)
    by_place = {(_group(row), row["provider"], row["dtype"]): row for row in rows}
    for axes, shown, metric in ((left, compared, "speedup"), (right, series, "percent_of_peak")):
        height = 0.8 / max(len(shown), 1)
        for index, of in enumerate(shown):
            found = [(place, by_place.get((group, *of))) for place, group in enumerate(groups)]
            bars_of = [(p, row) for p, row in found if row and row[metric] is not None]
            places = [p - 0.4 + (index + 0.5) * height for p, _ in bars_of]
            _bars(axes, places, [row for _, row in bars_of], height, colours[of], metric, look)
    _finish_speedup(left, rows, look, baseline)
    longest = max((row["percent_of_peak"] or 0 for row in rows), default=0)
    right.set_xlim(0, max(100, longest * 1.15))
    right.set_title("Arithmetic, % of the measured peak", color=look.text, loc="left", fontsize=11)
    left.set_yticks(range(len(groups)), groups, fontsize=9)
    left.set_ylim(len(groups) - 0.45, -0.55)
    for axes in (left, right):
        style(axes, look)
    handles, labels = right.get_legend_handles_labels()
    place, columns = "outside upper right", min(len(labels), 6)
    legend(figure, look, handles=handles, loc=place, ncols=columns, fontsize=9)
    caption = textwrap.fill(conditions(result), 165)
    figure.supxlabel(caption, color=look.text, fontsize=7.5, x=0.01, ha="left")
    return figure


def _group(row: Row) -> str:
    return f"{row['label'] or cell_words(row)}\n{_PASSES[row['pass']]}"


def _colours(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    others, hues = iter(_OTHERS * len(series)), dict(_HUES)
    for provider, _ in series:
        if provider not in hues:
            hues[provider] = next(others)
    return {(name, dtype): hues[name][_DTYPES.index(dtype)] for name, dtype in series}


def _bars(
    axes: Axes,
    places: Sequence[float],
    rows: Sequence[Row],
    height: float,
    colour: str,
    metric: str,
    look: Theme,
) -> None:
    """The bars of one provider and dtype, with the intervals of speed-ups as error bars."""
    start = 1 if metric == "speedup" else 0
    label = f"{rows[0]['provider']} {rows[0]['dtype']}" if rows else None
    widths = [row[metric] - start for row in rows]
    axes.barh(places, widths, height * 0.92, left=start, color=colour, label=label)
    for y, row in zip(places, rows, strict=True):
        value, text = row[metric], f"{row[metric]:.0f} %"
        if metric == "speedup":
            low, high = row["speedup_low"], row["speedup_high"]
            errors = [[max(0, value - low)], [max(0, high - value)]]
            axes.errorbar(value, y, xerr=errors, color=look.text, linewidth=0.8)
            value, text = max(value, high), f"{value:.2f}×"
        place, size = (max(value, start), y), 8 if height > 0.25 else 6.5
        axes.annotate(text, place, (3, 0), textcoords="offset points", va="center",
                      fontsize=size, color="#7d8590")  # fmt: skip


def _finish_speedup(axes: Axes, rows: Sequence[Row], look: Theme, baseline: str) -> None:
    """A logarithmic scale from 1: twice and half as fast are equally long."""
    ratios = [row["speedup"] for row in rows if row["speedup"] is not None] or [1.0]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min(0.9, min(ratios) * 0.9), max(2, *ratios) * 1.4)
    axes.axvline(1, color=look.text, linewidth=1)
    axes.set_title(f"Times as fast as {baseline}", color=look.text, loc="left", fontsize=11)


# Times and the roofline


def _time(result: Result, rows: Sequence[Row], look: Theme) -> Figure:
    """By length: a panel per operator, dtype and pass; a line per provider and shape."""
    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["op"], row["dtype"], row["pass"]), []).append(row)
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    width, height = 4.4 * columns + 0.6, 3.1 * lines + 0.6
    figure, grid = _figure(look, width, height, nrows=lines, ncols=columns, squeeze=False)
    for unused in list(grid.flat)[len(panels) :]:
        unused.remove()
    colours, shapes = _provider_colours(rows), list(dict.fromkeys(map(_family, rows)))
    for axes, (name, found) in zip(grid.flat, panels.items(), strict=False):
        for provider, colour in colours.items():
            for number, shape in enumerate(shapes):
                line = [r for r in found if (r["provider"], _family(r)) == (provider, shape)]
                _line(axes, line, colour, _MARKERS[number % len(_MARKERS)])
        axes.set_title(" ".join(name), color=look.text, loc="left", fontsize=10)
        axes.margins(x=0.06)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("ms", color=look.text, fontsize=9)
        axes.set_xlabel("length", color=look.text, fontsize=9)
        _style_both(axes, look)
    _legend(figure, colours, shapes, look)
    return figure


def _family(row: Row) -> str:
    return " ".join([row["op"], row["family"], *option_words(row)])


def _line(axes: Axes, rows: Sequence[Row], colour: str, marker: str) -> None:
    """Medians, and their intervals as a band."""
    rows = sorted(rows, key=lambda row: row["length"])
    x, y, low, high = ([row[key] for row in rows] for key in ("length", "ms", "ms_low", "ms_high"))
    axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _provider_colours(rows: Sequence[Row]) -> dict[str, str]:
    colours = _colours(list(dict.fromkeys((row["provider"], "fp32") for row in rows)))
    return {provider: colour for (provider, _), colour in colours.items()}


def _legend(figure: Figure, colours: dict[str, str], shapes: Sequence[str], look: Theme) -> None:
    handles = [Line2D([], [], color=c, label=name) for name, c in colours.items()]
    if len(shapes) <= len(_MARKERS):
        handles += [
            Line2D([], [], color=look.text, marker=m, linestyle="", markersize=4, label=shape)
            for shape, m in zip(shapes, _MARKERS, strict=False)
        ]
    legend(figure, look, handles=handles, loc="outside lower left", ncols=3, fontsize=8)


def _style_both(axes: Axes, look: Theme) -> None:
    style(axes, look)
    axes.yaxis.grid(True, color=look.faint, linewidth=0.6)
    axes.tick_params(which="both", labelsize=8)


def _roofline(result: Result, rows: Sequence[Row], look: Theme) -> Figure:
    """Throughput by intensity, with the limits of arithmetic and memory."""
    figure, axes = _figure(look, 8, 5)
    intensities = [row["intensity"] for row in rows]
    left, right = min(intensities) / 2, max(intensities) * 2
    read = result.peaks.get("read_bandwidth")
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for dtype in dtypes:
        peak = result.peaks.get(kind_of(dtype, result.peaks))
        if peak is None:
            continue
        xs = [left, right] if read is None else sorted([left, peak.rate / read.rate, right])
        ys = [peak.rate if read is None else min(peak.rate, read.rate * x) for x in xs]
        axes.plot(xs, ys, color=look.text, linewidth=1)
        # At the left end of the flat part, because most cells are at its right.
        start = left if read is None else max(peak.rate / read.rate, left)
        axes.annotate(f"{dtype} {peak.rate:.0f} GFLOP/s", (start, peak.rate), (14, 3),
                      textcoords="offset points", fontsize=8, color=look.text)  # fmt: skip
    colours = _provider_colours(rows)
    for row in rows:
        marker = _MARKERS[dtypes.index(row["dtype"])]
        axes.plot(row["intensity"], row["gflops"], marker, color=colours[row["provider"]],
                  markersize=5, alpha=0.8)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_xlabel("FLOP per byte of input and output", color=look.text, fontsize=9)
    axes.set_ylabel("GFLOP/s", color=look.text, fontsize=9)
    if read is not None:
        title = f"The slope: {read.rate:.0f} GB/s from memory; cells in the caches may be above it"
        axes.set_title(title, color=look.text, loc="left", fontsize=10)
    _style_both(axes, look)
    _legend(figure, colours, dtypes, look)
    return figure


def _breakdown(result: Result, rows: Sequence[Row], look: Theme) -> Figure:
    """The budget of each call as a bar of its items; a line marks the floor."""
    cells = [found for found in result.cells if found.rounds]
    budgets = [parts.microseconds(found) for found in cells]
    figure, axes = _figure(look, 9, 1.8 + 0.36 * len(cells))
    colours = plt.colormaps["tab10"].colors  # type: ignore[attr-defined]
    left = [0.0] * len(cells)
    for colour, (item, words) in zip(colours, parts.BUDGET.items(), strict=False):
        widths = [max(0.0, times[item]) for times in budgets]
        axes.barh(range(len(cells)), widths, 0.7, left=left, color=colour, label=words)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for place, times in enumerate(budgets):
        if times["floor"] > 1:
            axes.plot([times["floor"]] * 2, [place - 0.42, place + 0.42], color=look.text)
    names = [f"{found.cell.op} {found.cell.shape} {found.cell.passes}" for found in cells]
    axes.set_yticks(range(len(cells)), names, fontsize=8)
    axes.invert_yaxis()
    title = "Microseconds of a call; a line: an autograd.Function that does nothing"
    axes.set_title(title, color=look.text, loc="left", fontsize=10)
    style(axes, look)
    legend(figure, look, loc="outside lower left", ncols=3, fontsize=8)
    return figure


def style(axes: Axes, look: Theme) -> None:
    axes.set_facecolor(look.ground)
    axes.tick_params(which="both", colors=look.text, length=0)
    axes.xaxis.grid(True, color=look.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def legend(figure: Figure, look: Theme, **options: Any) -> None:
    for text in figure.legend(frameon=False, **options).get_texts():
        text.set_color(look.text)


KINDS: dict[str, Callable[[Result, Sequence[Row], Theme], Figure]] = {
    "speedup": _speedup,
    "time": _time,
    "roofline": _roofline,
    "breakdown": _breakdown,
}
