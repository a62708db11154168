"""A result as one HTML file: a sortable table, plots and the environment; it needs no network.

The plots are inline SVG. The script only sorts and filters the table.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from fastattn.bench import display, plots
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, summarise

_TITLES = {
    "speedup": "Speed-up and share of the peak",
    "time": "Time by length",
    "roofline": "Roofline",
}
_COLUMNS = display.columns_of(
    ("time", "speedup", "gflops", "peak", "roof", "gbs", "memory", "error")
)
# The keys of the columns that are sorted by number.
_KEYS = {
    "ms": "ms",
    "speed-up": "speedup",
    "GFLOP/s": "gflops",
    "% of peak": "percent_of_peak",
    "% of roof": "percent_of_roof",
    "GB/s": "gbs",
    "peak MB": "peak_mb",
    "rel. error": "relative_error",
}


def write(result: Result, path: Path, title: str = "Attention, measured") -> None:
    """Writes the page. Raises ValueError for a result without timings."""
    rows, env = summarise(result), result.environment
    facts = {
        "environment": env,
        "settings": result.settings,
        "providers": result.providers,
        "peaks": {kind: vars(peak) for kind, peak in result.peaks.items()},
    }
    text = html.escape
    parts = [
        f"<h1>{text(title)}</h1>",
        f"<p class=faint>{text(display.conditions(result))}</p>",
        "<ul>" + "".join(f"<li>{text(line)}" for line in display.closing(result, rows)) + "</ul>",
        *(_figure(result, kind) for kind in _TITLES),
        "<h2>All rows</h2>",
        '<p><input type=search placeholder="filter: bf16 fwd fastattn" aria-label="filter"></p>',
        _table(rows),
        "<h2>Conditions</h2>",
        "<details><summary>Environment, settings, providers, peaks</summary><pre>"
        f"{text(json.dumps(facts, indent=1))}</pre></details>",
        f"<p class=faint>{env['utc']}, commit {text(str(env['commit']))}. One process per "
        "provider, interleaved rounds; every result was compared with float64 before it was timed; "
        "intervals are of 95 %. Written by <code>fastattn bench report</code>.</p>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _PAGE.replace("{title}", text(title)).replace("{body}", "\n".join(parts))
    path.write_text(page, encoding="utf-8")


def _figure(result: Result, kind: str) -> str:
    pictures = (f"<div class={theme}>{_svg(result, kind, theme)}</div>" for theme in plots.THEMES)
    is_open = " open" if kind == "speedup" else ""
    return f"<details{is_open}><summary>{_TITLES[kind]}</summary>{''.join(pictures)}</details>"


def _svg(result: Result, kind: str, theme: str) -> str:
    figure = plots.make(result, kind, theme)
    buffer = io.StringIO()
    # Glyphs as text are much smaller and searchable. The salt makes ids differ between plots.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{kind}-{theme}"}):
        figure.savefig(buffer, format="svg", facecolor=figure.get_facecolor())
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{kind}" ', 1)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(
        f"<th{' class=number' if name in _KEYS else ''}><button>{html.escape(name)}</button>"
        for name in _COLUMNS
    )
    body = "\n".join(_line(row) for row in rows)
    table = f"<table><thead><tr>{head}</thead><tbody>\n{body}\n</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _line(row: Row) -> str:
    texts = {name: html.escape(text) for name, text in display.table_line(row).items()}
    label = f"<b>{html.escape(row['label'])}</b><br>" if row["label"] else ""
    texts["cell"] = f"{label}<code>{texts['cell']}</code>"
    cells = []
    for name in _COLUMNS:
        value = row[_KEYS[name]] if name in _KEYS else None
        sort = "" if value is None else f' data-value="{value:.9g}"'
        kind = " class=number" if name in _KEYS and name != "speed-up" else ""
        cells.append(f"<td{kind}{sort}>{texts[name]}")
    mark = "WRONG" if row["status"] not in ("ok", "UNAVAILABLE", "SKIPPED") else row["verdict"]
    mark = "IMPOSSIBLE" if row["impossible"] else mark
    return f'<tr class="{mark or ""}">{"".join(cells)}'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark }
@media (prefers-color-scheme: dark) { .light { display: none } }
@media (prefers-color-scheme: light) { .dark { display: none } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1rem }
.faint { opacity: .7 }
details { border-top: 1px solid #8886; padding: .5rem 0 }
summary { cursor: pointer; font-weight: 600 }
svg { max-width: 100%; height: auto } pre, .scroll { overflow: auto }
table { border-collapse: collapse; font-size: 12.5px; width: 100% }
th, td { border-bottom: 1px solid #8886; padding: .3rem .35rem; text-align: left }
.number { text-align: right; white-space: nowrap }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap }
th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " ▲" }
th[aria-sort=descending] button::after { content: " ▼" }
.FASTER td:nth-child(7) { color: #1a7f37 }
.SLOWER td:nth-child(7), .WRONG td, .IMPOSSIBLE td { color: #cf222e }
</style></head><body>
{body}
<script>
const table = document.querySelector("table"), body = table.tBodies[0];
const rows = [...body.rows];
const value = (row, i) => row.cells[i].dataset.value ?? row.cells[i].innerText;
table.tHead.addEventListener("click", event => {
  const th = event.target.closest("th");
  if (!th) return;
  const i = th.cellIndex, down = th.getAttribute("aria-sort") === "ascending";
  for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", down ? "descending" : "ascending");
  const numeric = th.classList.contains("number");
  const known = row => !numeric || row.cells[i].dataset.value !== undefined;
  body.append(...[...rows].sort((a, b) => {
    if (known(a) !== known(b)) return known(a) ? -1 : 1;  // rows without a value stay below
    const [x, y] = [value(a, i), value(b, i)];
    return (numeric ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
  }));
});
document.querySelector("input").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.innerText.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
</script></body></html>
"""
