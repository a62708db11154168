"""The pictures of the documentation that `bench` does not draw."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from tables import DTYPES, Speeds

from fastattn.bench import breakdown, plots
from fastattn.bench.results import Result

_COLOURS = ("#7d8590", "#2f81f7", "#d1742f", "#3f9a6c", "#a371f7", "#c9a227")  # of the processors
_MARKERS = "sD^ovP"


def across(found: dict[str, Speeds], theme: str) -> Figure:
    """The table of the first screen of README.md: a panel for each dtype, a dot for a processor."""
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


def budgets(result: Result, theme: str) -> Figure:
    """The budget of each call as a bar of its items; a line marks the floor."""
    with plt.rc_context(plots.THEMES[theme]):
        return _budgets(result)


def _budgets(result: Result) -> Figure:
    cells = [found for found in result.cells if found.rounds]
    times_of = [breakdown.microseconds(found) for found in cells]
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
    names = [f"{found.cell.op} {found.cell.shape} {found.cell.passes}" for found in cells]
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Microseconds of a call; a line: an autograd.Function that does nothing")
    figure.legend(loc="outside lower left", ncols=2)
    return figure
