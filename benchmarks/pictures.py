"""The picture of README.md: the table of the first screen, a dot for each processor."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from tables import Table

from fastattn.bench import plots

_COLOURS = ("#7d8590", "#2f81f7", "#d1742f", "#3f9a6c", "#a371f7", "#c9a227")  # of the processors
_MARKERS = "sD^ovP"


def draw_across(found: dict[str, Table], path: Path, theme: str) -> None:
    figure = across(found, theme)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor=figure.get_facecolor())
    plt.close(figure)


def across(found: dict[str, Table], theme: str) -> Figure:
    """The speed-ups of all processors, on a logarithmic axis, a panel for each dtype."""
    look = plots.THEMES[theme]
    first = next(iter(found.values()))
    lines = list(dict.fromkeys(line for table in found.values() for line in table.lines))
    figure, panels = plt.subplots(
        1,
        len(first.values),
        figsize=(11, 0.42 * len(lines) + 1.5),
        sharey=True,
        facecolor=look.ground,
        layout="constrained",
    )
    for number, (axes, dtype) in enumerate(zip(panels, first.values, strict=True)):
        for colour, marker, (processor, table) in zip(
            _COLOURS, _MARKERS, found.items(), strict=False
        ):
            speeds = {line: texts[number] for line, texts in table.lines.items()}
            known = [line for line in lines if speeds.get(line, "–") != "–"]
            x = [float(speeds[line].removesuffix("×")) for line in known]
            y = [lines.index(line) for line in known]
            axes.plot(x, y, marker, color=colour, label=processor, markersize=6, alpha=0.9)
        _finish(axes, dtype, look)
    panels[0].set_yticks(range(len(lines)), [", ".join(line) for line in lines], fontsize=9)
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    plots.legend(figure, look, handles=handles, labels=labels, loc="outside lower left",
                 ncols=len(labels), fontsize=9)  # fmt: skip
    return figure


def _finish(axes: Axes, dtype: str, look: plots.Theme) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1, color=look.text, linewidth=1)
    axes.set_title(f"Times as fast as torch, {dtype}", color=look.text, loc="left", fontsize=11)
    plots.style(axes, look)
    axes.grid(True, color=look.faint, linewidth=0.6)
