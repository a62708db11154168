"""The bar chart of a result: speed-ups and shares of the peak. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastattn.bench.display import cell_words, conditions
from fastattn.bench.results import Result
from fastattn.bench.summary import Row

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


@dataclass(frozen=True)
class Theme:
    ground: str
    text: str
    faint: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0"),
    "dark": Theme("#0d1117", "#e6edf3", "#3d444d"),
}


def speedup(result: Result, rows: Sequence[Row], look: Theme) -> Figure:
    """Two bar charts: times as fast as the baseline, and the share of the peak."""
    baseline = result.settings["baseline"]
    groups = list(dict.fromkeys(_group(row) for row in rows))
    series = list(dict.fromkeys((row["provider"], row["dtype"]) for row in rows))
    series.sort(key=lambda s: (s[0] == baseline, s[0], _DTYPES.index(s[1])))
    compared = [s for s in series if s[0] != baseline]

    bars = len(groups) * max(0.17 * len(compared), 0.1 * len(series), 0.3)
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(11, bars * 1.25 + 1.8),
        sharey=True,
        width_ratios=(1.15, 1),
        facecolor=look.ground,
        layout="constrained",
    )
    colours = colours_of(series)
    _bars(left, rows, groups, compared, colours, "speedup", look)
    _bars(right, rows, groups, series, colours, "percent_of_peak", look)
    left.axvline(1, color=look.text, linewidth=1)
    left.set_title(f"Times as fast as {baseline}", color=look.text, loc="left", fontsize=11)
    right.set_title("Arithmetic, % of the measured peak", color=look.text, loc="left", fontsize=11)
    right.set_xlim(0, max(100, right.get_xlim()[1]))
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
    passes = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}[row["pass"]]
    return f"{row['label'] or cell_words(row)}\n{passes}"


def colours_of(series: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    others = iter(_OTHERS * len(series))
    hues = dict(_HUES)
    colours = {}
    for provider, dtype in series:
        if provider not in hues:
            hues[provider] = next(others)
        colours[provider, dtype] = hues[provider][_DTYPES.index(dtype)]
    return colours


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    groups: list[str],
    series: list[tuple[str, str]],
    colours: dict[tuple[str, str], str],
    metric: str,
    look: Theme,
) -> None:
    """One bar per group and series, with the interval of a speed-up as an error bar.

    Speed-ups have a logarithmic scale from 1: twice and half as fast are equally long.
    """
    start = 1 if metric == "speedup" else 0
    height = 0.8 / max(len(series), 1)
    by_place = {(_group(row), row["provider"], row["dtype"]): row for row in rows}
    longest = max((row[metric] or 0 for row in rows), default=0) or 1
    for index, (provider, dtype) in enumerate(series):
        labelled = False
        for place, group in enumerate(groups):
            row = by_place.get((group, provider, dtype))
            if row is None or row[metric] is None:
                continue
            y = place - 0.4 + (index + 0.5) * height
            value = row[metric]
            axes.barh(
                y,
                value - start,
                height * 0.92,
                left=start,
                color=colours[provider, dtype],
                label=None if labelled else f"{provider} {dtype}",
            )
            labelled = True
            text = f"{value:.0f} %"
            if metric == "speedup":
                low, high = row["speedup_low"], row["speedup_high"]
                errors = [[max(0, value - low)], [max(0, high - value)]]
                axes.errorbar(value, y, xerr=errors, color=look.text, linewidth=0.8)
                value, text = max(value, high), f"{value:.2f}×"
            size = 8 if height > 0.25 else 6.5
            axes.annotate(
                text,
                (max(value, start), y),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=size,
                color="#7d8590",
            )
    if metric != "speedup":
        axes.set_xlim(0, longest * 1.15)
        return
    shortest = min((row[metric] or 1 for row in rows), default=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min(0.9, shortest * 0.9), max(2, longest) * 1.4)


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
