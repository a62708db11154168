"""The plots of a result: speed-ups, the roofline, the budget of calls; and a page of the first two.

Needs matplotlib.
"""

from __future__ import annotations

import html
import io
import json
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastattn._table import as_html
from fastattn.bench import breakdown as parts
from fastattn.bench import summary
from fastattn.bench.machine import KIND_OF_DTYPE
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, summarise

_DTYPES = ("fp32", "bf16", "fp16")
_PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
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


def draw(result: Result, path: Path, kind: str = "speedup", theme: str = "light") -> None:
    """Writes one of the plots; the suffix of the file selects the format."""
    save(make(result, kind, theme), path)


def make(result: Result, kind: str, theme: str = "light") -> Figure:
    rows = [row for row in summarise(result) if row["ms"] is not None]
    if not rows:
        raise ValueError("nothing was timed, so there is nothing to plot")
    kinds = {"speedup": _speedup, "roofline": _roofline, "breakdown": _breakdown}
    with plt.rc_context(THEMES[theme]):
        return kinds[kind](result, rows)


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
    figure.supxlabel(
        textwrap.fill(summary.conditions(result), 165), fontsize=7.5, x=0.01, ha="left"
    )
    return figure


def _group(row: Row) -> str:
    return f"{row['label'] or summary.cell_words(row)}\n{_PASSES[row['pass']]}"


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


def _roofline(result: Result, rows: Sequence[Row]) -> Figure:
    """Throughput by intensity, with the limits of arithmetic and memory."""
    figure, axes = plt.subplots(figsize=(8, 5))
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = row["intensity"], row["gflops"]
        points.setdefault(f"{row['provider']} {row['dtype']}", []).append(point)
    for name, xy in points.items():
        axes.plot(*zip(*xy, strict=True), "o", label=name)
    intensities = [row["intensity"] for row in rows]
    left, right = min(intensities) / 2, max(intensities) * 2
    read = result.peaks["read_bandwidth"].rate
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        peak = result.peaks[KIND_OF_DTYPE[dtype]].rate
        ridge = max(peak / read, left)  # from this intensity on, arithmetic is the limit
        limits = [min(peak, read * left), peak, peak]
        axes.plot([left, ridge, max(ridge, right)], limits, color=plt.rcParams["text.color"])
        axes.annotate(f"{dtype} {peak:.0f} GFLOP/s", (ridge, peak), (14, 3),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylabel="GFLOP/s")
    axes.set_xlabel("FLOP per byte of input and output")
    axes.set_title(f"The slope: {read:.0f} GB/s from memory; cells in the caches may be above it")
    axes.legend()
    return figure


def _breakdown(result: Result, rows: Sequence[Row]) -> Figure:
    """The budget of each call as a bar of its items; a line marks the floor."""
    cells = [found for found in result.cells if found.rounds]
    budgets = [parts.microseconds(found) for found in cells]
    figure, axes = plt.subplots(figsize=(9, 1.8 + 0.36 * len(cells)))
    left = [0.0] * len(cells)
    for item, words in parts.BUDGET.items():
        widths = [max(0.0, times[item]) for times in budgets]
        axes.barh(range(len(cells)), widths, 0.7, left=left, label=words)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for place, times in enumerate(budgets):
        if times["floor"] > 1:
            ends, colour = [place - 0.42, place + 0.42], plt.rcParams["text.color"]
            axes.plot([times["floor"]] * 2, ends, color=colour)
    names = [f"{found.cell.op} {found.cell.shape} {found.cell.passes}" for found in cells]
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Microseconds of a call; a line: an autograd.Function that does nothing")
    figure.legend(loc="outside lower left", ncols=2)
    return figure


_METRICS = ("time", "speedup", "gflops", "peak", "roof", "gbs", "memory", "error")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto }}
svg {{ max-width: 100%; height: auto }} pre {{ overflow: auto }}
table {{ border-collapse: collapse; font-size: 12.5px }}
th, td {{ border-bottom: 1px solid #8886; padding: .3rem .35rem; text-align: left }}
</style></head><body>
<h1>{title}</h1>
<p>{conditions}</p>
<ul>{closing}</ul>
{plots}
<h2>All rows</h2>
{table}
<h2>Conditions</h2>
<pre>{facts}</pre>
</body></html>
"""


def report(result: Result, path: Path, title: str) -> None:
    """Writes one HTML file: the table, plots as inline SVG and the environment."""
    rows, text = summarise(result), html.escape
    facts = {name: getattr(result, name) for name in ("environment", "settings", "providers")}
    facts["peaks"] = {kind: vars(peak) for kind, peak in result.peaks.items()}
    page = _PAGE.format(
        title=text(title),
        conditions=text(summary.conditions(result)),
        closing="".join(f"<li>{text(line)}" for line in summary.closing(result, rows)),
        plots="\n".join(map(partial(_svg, result), ("speedup", "roofline"))),
        table=as_html(summary.lines(rows, _METRICS)),
        facts=text(json.dumps(facts, indent=1)),
    )
    path.write_text(page, encoding="utf-8")


def _svg(result: Result, kind: str) -> str:
    figure, buffer = make(result, kind), io.StringIO()
    # Glyphs as text are much smaller and searchable. The salt makes ids differ between plots.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": kind}):
        figure.savefig(buffer, format="svg")
    plt.close(figure)
    text = buffer.getvalue()
    return f"<h2>{kind.capitalize()}</h2>" + text[text.index("<svg") :]
