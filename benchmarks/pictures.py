"""The picture of README.md: the table of the first screen, a dot for each processor."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from tables import DTYPES, Speeds

from fastattn.bench import plots

_COLOURS = ("#7d8590", "#2f81f7", "#d1742f", "#3f9a6c", "#a371f7", "#c9a227")  # of the processors
_MARKERS = "sD^ovP"


def across(found: dict[str, Speeds], theme: str) -> Figure:
    """The speed-ups of all processors, on a logarithmic axis, a panel for each dtype."""
    with plt.rc_context(plots.THEMES[theme]):
        return _across(found)


def _across(found: dict[str, Speeds]) -> Figure:
    lines = list(dict.fromkeys(line for speeds in found.values() for line in speeds))
    size = (11, 0.42 * len(lines) + 1.5)
    figure, panels = plt.subplots(ncols=len(DTYPES), figsize=size, sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for colour, marker, (processor, speeds) in zip(
            _COLOURS, _MARKERS, found.items(), strict=False
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
