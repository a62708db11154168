"""The picture of README.md: the table of the first screen, a dot for each processor."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from tables import DTYPES, Speeds

from fastattn.bench import plots

_COLOURS = ("#7d8590", "#2f81f7", "#d1742f", "#3f9a6c", "#a371f7", "#c9a227")  # of the processors
_MARKERS = "sD^ovP"


def across(found: dict[str, Speeds], theme: str) -> Figure:
    """The speed-ups of all processors, on a logarithmic axis, a panel for each dtype."""
    look = plots.THEMES[theme]
    lines = list(dict.fromkeys(line for speeds in found.values() for line in speeds))
    figure, panels = plt.subplots(
        1,
        len(DTYPES),
        figsize=(11, 0.42 * len(lines) + 1.5),
        sharey=True,
        facecolor=look.ground,
        layout="constrained",
    )
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for colour, marker, (processor, speeds) in zip(
            _COLOURS, _MARKERS, found.items(), strict=False
        ):
            x = {lines.index(line): of[dtype] for line, of in speeds.items() if dtype in of}
            axes.plot(
                list(x.values()),
                list(x),
                marker,
                color=colour,
                label=processor,
                markersize=6,
                alpha=0.9,
            )
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
