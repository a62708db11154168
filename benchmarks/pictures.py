"""Pictures of results: `python benchmarks/pictures.py RESULT.json PICTURE.png`, or by `render`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from tables import DTYPES, PASSES, Speeds

from fastattn.bench import breakdown, results, summary
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, summarise

_DTYPES = ("fp32", "bf16", "fp16")
_LOOK: dict[str, Any] = {
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "font.size": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
THEMES: dict[str, Any] = {"light": _LOOK, "dark": {**plt.style.library["dark_background"], **_LOOK}}


def draw(result: Result, path: Path, theme: str = "light") -> None:
    """Draws speed-ups and shares of the peak; the suffix of the file selects the format."""
    rows = [row for row in summarise(result) if row["ms"] is not None]
    if not rows:
        raise ValueError("nothing was timed, so there is nothing to plot")
    with plt.rc_context(THEMES[theme]):
        save(_speedup(result, rows), path)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _speedup(result: Result, rows: Sequence[Row]) -> Figure:
    """Two bar charts: times as fast as the baseline, and the share of the peak."""
    baseline = result.settings["baseline"]
    groups = list(dict.fromkeys(map(_group, rows)))
    series = list(dict.fromkeys((row["provider"], row["dtype"]) for row in rows))
    series.sort(key=lambda s: (s[0] == baseline, s[0], _DTYPES.index(s[1])))
    compared = [of for of in series if of[0] != baseline]
    height = len(groups) * max(0.21 * len(compared), 0.13 * len(series), 0.38) + 1.8
    figure, (left, right) = plt.subplots(
        ncols=2, sharey=True, width_ratios=(1.15, 1), figsize=(11, height)
    )
    # The map has a hue for each provider, with a shade for each dtype.
    colours, names = plt.colormaps["tab20c"], list(dict.fromkeys(row["provider"] for row in rows))
    for axes, shown, metric in ((left, compared, "speedup"), (right, series, "percent_of_peak")):
        width = 0.8 / max(len(shown), 1)
        for index, of in enumerate(shown):
            colour = colours(4 * (names.index(of[0]) % 5) + _DTYPES.index(of[1]))
            bars = {
                groups.index(_group(row)) - 0.4 + (index + 0.5) * width: row
                for row in rows
                if (row["provider"], row["dtype"]) == of and row[metric] is not None
            }
            _bars(axes, bars, width, metric, color=colour, label=" ".join(of))
    left.axvline(1, color=plt.rcParams["text.color"], linewidth=1)
    left.set_title(f"Times as fast as {baseline}")
    left.set_yticks(range(len(groups)), groups)
    left.set_ylim(len(groups) - 0.45, -0.55)
    left.set_xscale("log", base=2)  # twice and half as fast are equally long
    left.xaxis.set_major_formatter("{x:g}")
    right.set_title("Arithmetic, % of the measured peak")
    for axes in (left, right):
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.12)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=6)
    conditions = textwrap.fill(summary.conditions(result), 165)
    figure.supxlabel(conditions, fontsize=7.5, x=0.01, ha="left")
    return figure


def _group(row: Row) -> str:
    return f"{row['label'] or summary.cell_words(row)}\n{PASSES[row['pass']]}"


def _bars(axes: Axes, bars: dict[float, Row], height: float, metric: str, **look: Any) -> None:
    """The bars of one provider and dtype, with the intervals of speed-ups as error bars."""
    start, form = (1, "{:.2f}×") if metric == "speedup" else (0, "{:.0f} %")
    values = [row[metric] for row in bars.values()]
    if metric == "speedup":
        rows = bars.values()
        look["xerr"] = [
            [row["speedup"] - row["speedup_low"] for row in rows],
            [row["speedup_high"] - row["speedup"] for row in rows],
        ]
        look |= {"ecolor": plt.rcParams["text.color"], "error_kw": {"elinewidth": 0.8}}
    widths = [value - start for value in values]
    drawn = axes.barh(list(bars), widths, height * 0.92, left=start, **look)
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=8)


_COLOURS = ("#7d8590", "#2f81f7", "#d1742f", "#3f9a6c", "#a371f7", "#c9a227")  # of the processors
_MARKERS = "sD^ovP"


def across(by_processor: dict[str, Speeds], theme: str) -> Figure:
    """The table of the first screen of README.md: a panel for each dtype, a dot for a processor."""
    with plt.rc_context(THEMES[theme]):
        return _across(by_processor)


def _across(by_processor: dict[str, Speeds]) -> Figure:
    lines = list(dict.fromkeys(line for speeds in by_processor.values() for line in speeds))
    size = (11, 0.42 * len(lines) + 1.5)
    figure, panels = plt.subplots(ncols=len(DTYPES), figsize=size, sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for colour, marker, (processor, speeds) in zip(
            _COLOURS, _MARKERS, by_processor.items(), strict=False
        ):
            x = {lines.index(line): of[dtype] for line, of in speeds.items() if dtype in of}
            look = {"color": colour, "marker": marker, "markersize": 6, "alpha": 0.9}
            axes.plot(list(x.values()), list(x), linestyle="", label=processor, **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}×")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axvline(1, color=plt.rcParams["text.color"], linewidth=1)
        axes.set_title(f"Times as fast as torch, {dtype}")
    panels[0].set_yticks(range(len(lines)), [", ".join(line) for line in lines])
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels))
    return figure


def budgets(result: Result, theme: str) -> Figure:
    """The budget of each call as a bar of its items; a line marks the floor."""
    with plt.rc_context(THEMES[theme]):
        return _budgets(result)


def _budgets(result: Result) -> Figure:
    cells = [measured for measured in result.cells if measured.rounds]
    times_of = [breakdown.microseconds(measured) for measured in cells]
    figure, axes = plt.subplots(figsize=(9, 1.8 + 0.36 * len(cells)))
    left = [0.0] * len(cells)
    for item, words in breakdown.BUDGET.items():
        widths = [max(0.0, times[item]) for times in times_of]
        axes.barh(range(len(cells)), widths, 0.7, left=left, label=words)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for place, times in enumerate(times_of):
        if times["floor"] > 1:
            ends, colour = [place - 0.42, place + 0.42], plt.rcParams["text.color"]
            axes.plot([times["floor"]] * 2, ends, color=colour)
    names = [
        f"{measured.cell.op} {measured.cell.shape} {measured.cell.passes}" for measured in cells
    ]
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Microseconds of a call; a line: an autograd.Function that does nothing")
    figure.legend(loc="outside lower left", ncols=2)
    return figure


if __name__ == "__main__":
    draw(results.load(Path(sys.argv[1])), Path(sys.argv[2]))
    print(f"Written: {sys.argv[2]}")
