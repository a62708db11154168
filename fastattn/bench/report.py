"""A result as one HTML file: the table, plots as inline SVG and the environment."""

from __future__ import annotations

import html
import io
import json
from pathlib import Path

from matplotlib import pyplot as plt

from fastattn.bench import display, plots
from fastattn.bench.results import Result
from fastattn.bench.summary import summarise

_TITLES = {
    "speedup": "Speed-up and share of the peak",
    "time": "Time by length",
    "roofline": "Roofline",
}
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
<table>
{table}
</table>
<h2>Conditions</h2>
<pre>{facts}</pre>
</body></html>
"""


def write(result: Result, path: Path, title: str = "Attention, measured") -> None:
    """Writes the page. Raises ValueError for a result without timings."""
    rows, text = summarise(result), html.escape
    facts = {
        "environment": result.environment,
        "settings": result.settings,
        "providers": result.providers,
        "peaks": {kind: vars(peak) for kind, peak in result.peaks.items()},
    }
    lines = display.lines(rows, _METRICS)
    page = _PAGE.format(
        title=text(title),
        conditions=text(display.conditions(result)),
        closing="".join(f"<li>{text(line)}" for line in display.closing(result, rows)),
        plots="\n".join(f"<h2>{words}</h2>{_svg(result, kind)}" for kind, words in _TITLES.items()),
        table="\n".join("<tr>" + "".join(f"<td>{text(x)}" for x in line) for line in lines),
        facts=text(json.dumps(facts, indent=1)),
    )
    path.write_text(page, encoding="utf-8")


def _svg(result: Result, kind: str) -> str:
    figure, buffer = plots.make(result, kind), io.StringIO()
    # Glyphs as text are much smaller and searchable. The salt makes ids differ between plots.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": kind}):
        figure.savefig(buffer, format="svg")
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
