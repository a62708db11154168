"""All plots of a result. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from fastattn.bench import breakdown as parts
from fastattn.bench import plots
from fastattn.bench.display import cell_words
from fastattn.bench.peaks import kind_of
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, option_words, summarise

_MARKERS = "osD^vPX*"


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
    figure: Figure = KINDS[kind](result, rows, plots.THEMES[theme])
    return figure


def _facets(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of each operator, dtype and pass."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["dtype"], row["pass"]), []).append(row)
    return found


def _grid(count: int, look: plots.Theme) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    lines = math.ceil(count / columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4.4 * columns + 0.6, 3.1 * lines + 0.6),
        squeeze=False,
        facecolor=look.ground,
        layout="constrained",
    )
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.remove()
    return figure, flat[:count]


def _by_length(column: str, unit: str, log: bool = True) -> Callable[..., Figure]:
    """One panel per operator, dtype and pass; one line per provider and shape."""

    def chart(result: Result, rows: Sequence[Row], look: plots.Theme) -> Figure:
        shown = [row for row in rows if row[column] is not None]
        facets = _facets(shown)
        figure, frames = _grid(max(len(facets), 1), look)
        colours = _provider_colours(shown)
        shapes = list(dict.fromkeys(_family(row) for row in shown))
        for axes, (name, found) in zip(frames, facets.items(), strict=False):
            for provider, colour in colours.items():
                for number, shape in enumerate(shapes):
                    line = [r for r in found if (r["provider"], _family(r)) == (provider, shape)]
                    marker = _MARKERS[number % len(_MARKERS)]
                    _line(axes, line, column, colour, marker)
            axes.set_title(" ".join(name), color=look.text, loc="left", fontsize=10)
            axes.margins(x=0.06)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            positive = all(row[column] > 0 for row in found)
            if log and positive:
                axes.set_yscale("log")
            elif column != "relative_error":
                axes.set_ylim(bottom=0)
            if axes.get_yscale() == "log":
                _round_ticks(axes)
            axes.set_ylabel(unit, color=look.text, fontsize=9)
            axes.set_xlabel("length", color=look.text, fontsize=9)
            _style(axes, look)
        _legend(figure, colours, shapes, look)
        return figure

    return chart


def _round_ticks(axes: Axes) -> None:
    """1, 2 and 5 times a power of ten; more ticks on an axis with a small range."""
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _family(row: Row) -> str:
    return " ".join([row["op"], row["family"], *option_words(row)])


def _line(axes: Axes, rows: list[Row], column: str, colour: str, marker: str) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["length"])
    x, y = [row["length"] for row in rows], [row[column] for row in rows]
    axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4)
    if column in ("ms", "gflops"):
        # The interval of the median; for throughput, its reciprocal.
        low = [row["ms_low"] / row["ms"] for row in rows]
        high = [row["ms_high"] / row["ms"] for row in rows]
        if column == "gflops":
            low, high = [1 / h for h in high], [1 / w for w in low]
        under = [value * w for value, w in zip(y, low, strict=True)]
        over = [value * h for value, h in zip(y, high, strict=True)]
        axes.fill_between(x, under, over, color=colour, alpha=0.2, linewidth=0)


def _provider_colours(rows: Sequence[Row]) -> dict[str, str]:
    providers = list(dict.fromkeys((row["provider"], "fp32") for row in rows))
    colours = plots.colours_of(providers)
    return {provider: colour for (provider, _), colour in colours.items()}


def _legend(
    figure: Figure, colours: dict[str, str], shapes: Sequence[str], look: plots.Theme
) -> None:
    handles = [Line2D([], [], color=c, label=name) for name, c in colours.items()]
    if len(shapes) <= len(_MARKERS):
        handles += [
            Line2D([], [], color=look.text, marker=m, linestyle="", markersize=4, label=shape)
            for shape, m in zip(shapes, _MARKERS, strict=False)
        ]
    plots.legend(figure, look, handles=handles, loc="outside lower left", ncols=3, fontsize=8)


def _style(axes: Axes, look: plots.Theme) -> None:
    plots.style(axes, look)
    axes.yaxis.grid(True, color=look.faint, linewidth=0.6)
    axes.tick_params(which="both", labelsize=8)


def heatmap(result: Result, rows: Sequence[Row], look: plots.Theme) -> Figure:
    """Every speed-up as a colour, on a logarithmic scale; blue is faster than the baseline."""
    shown = [row for row in rows if row["speedup"] is not None]
    if not shown:
        raise ValueError("no provider was compared with the baseline")
    lines = list(dict.fromkeys(_cell_name(row) for row in shown))
    columns = list(dict.fromkeys((r["provider"], r["dtype"], r["pass"]) for r in shown))
    values = [[math.nan] * len(columns) for _ in lines]
    for row in shown:
        place = columns.index((row["provider"], row["dtype"], row["pass"]))
        values[lines.index(_cell_name(row))][place] = math.log2(row["speedup"])
    figure, axes = plt.subplots(
        figsize=(4.5 + 0.95 * len(columns), 1.3 + 0.34 * len(lines)),
        facecolor=look.ground,
        layout="constrained",
    )
    axes.imshow(values, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                ink = "#ffffff" if abs(value) > 1.2 else "#1f2328"
                text = f"{2**value:.2f}×"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(columns)), ["\n".join(column) for column in columns], fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.tick_params(colors=look.text, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_facecolor(look.ground)
    title = f"Times as fast as {result.settings['baseline']}"
    figure.suptitle(title, color=look.text, x=0.01, ha="left", fontsize=10)
    return figure


def _cell_name(row: Row) -> str:
    return row["label"] or cell_words(row)


def roofline(result: Result, rows: Sequence[Row], look: plots.Theme) -> Figure:
    """Throughput by intensity, with the limits of arithmetic and memory."""
    figure, axes = plt.subplots(figsize=(8, 5), facecolor=look.ground, layout="constrained")
    intensities = [row["intensity"] for row in rows]
    left, right = min(intensities) / 2, max(intensities) * 2
    read = result.peaks.get("read_bandwidth")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        peak = result.peaks.get(kind_of(dtype, result.peaks))
        if peak is None:
            continue
        xs = [left, right] if read is None else [left, peak.rate / read.rate, right]
        ys = [peak.rate if read is None else min(peak.rate, read.rate * x) for x in xs]
        order = sorted(range(len(xs)), key=xs.__getitem__)
        axes.plot([xs[n] for n in order], [ys[n] for n in order], color=look.text, linewidth=1)
        # At the left end of the flat part, because most cells are at its right.
        start = max(xs[1] if len(xs) == 3 else left, left)
        axes.annotate(f"{dtype} {peak.rate:.0f} GFLOP/s", (start, peak.rate), (14, 3),
                      textcoords="offset points", fontsize=8, color=look.text)  # fmt: skip
    colours = _provider_colours(rows)
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
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
    _style(axes, look)
    _legend(figure, colours, dtypes, look)
    return figure


def breakdown(result: Result, rows: Sequence[Row], look: plots.Theme) -> Figure:
    """The budget of each call as a bar of its items; a line marks the floor."""
    cells = [found for found in result.cells if found.rounds]
    budgets = [parts.microseconds(found) for found in cells]
    figure, axes = plt.subplots(
        figsize=(9, 1.8 + 0.36 * len(cells)), facecolor=look.ground, layout="constrained"
    )
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
    plots.style(axes, look)
    plots.legend(figure, look, loc="outside lower left", ncols=3, fontsize=8)
    return figure


KINDS: dict[str, Callable[..., Any]] = {
    "speedup": plots.speedup,
    "heatmap": heatmap,
    "time": _by_length("ms", "ms"),
    "throughput": _by_length("gflops", "GFLOP/s", log=False),
    "roofline": roofline,
    "memory": _by_length("peak_mb", "MB"),
    "error": _by_length("relative_error", "relative error"),
    "breakdown": breakdown,
}
