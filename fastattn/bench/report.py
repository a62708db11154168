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

from fastattn.bench import charts, display, plots
from fastattn.bench.results import Result
from fastattn.bench.summary import Row, summarise

_TITLES = {
    "speedup": "Speed-up and share of the peak",
    "heatmap": "Speed-ups, all cells",
    "time": "Time by length",
    "throughput": "Throughput by length",
    "roofline": "Roofline",
    "memory": "Memory by length",
    "error": "Error by length",
}
# Heading, key of the row to sort by, and whether the values are numbers.
_COLUMNS = (
    ("cell", "shape", False),
    ("dtype", "dtype", False),
    ("pass", "pass", False),
    ("provider", "provider", False),
    ("ms", "ms", True),
    ("speed-up", "speedup", True),
    ("verdict", "verdict", False),
    ("GFLOP/s", "gflops", True),
    ("% of peak", "percent_of_peak", True),
    ("% of roof", "percent_of_roof", True),
    ("GB/s", "gbs", True),
    ("MB", "peak_mb", True),
    ("rel. error", "relative_error", True),
    ("rounds", "rounds", True),
)


def write(result: Result, path: Path, title: str = "Attention, measured") -> None:
    """Writes the page. Raises ValueError for a result without timings."""
    rows = summarise(result)
    env, settings = result.environment, result.settings
    facts = {"environment": env, "settings": settings, "providers": result.providers}
    peaks = {kind: vars(peak) for kind, peak in result.peaks.items()}
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=faint>{_text(display.conditions(result))}</p>",
        "<ul>" + "".join(f"<li>{_text(line)}" for line in display.closing(result, rows)) + "</ul>",
        *_figures(result),
        "<h2>All rows</h2>",
        _table(rows),
        "<h2>Conditions</h2>",
        "<details><summary>Environment, settings, providers, peaks</summary><pre>"
        f"{_text(json.dumps(facts | {'peaks': peaks}, indent=1))}</pre></details>",
        f"<p class=faint>{env['utc']}, commit {_text(str(env['commit']))}. One process per "
        "provider, interleaved rounds; every result was compared with float64 before it was timed; "
        "intervals are of 95 %. Written by <code>fastattn bench report</code>.</p>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _PAGE.replace("{title}", html.escape(title)).replace("{body}", "\n".join(parts))
    path.write_text(page, encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text)


def _figures(result: Result) -> list[str]:
    parts = []
    for kind, title in _TITLES.items():
        if kind == "heatmap" and len(result.providers) < 2:
            continue
        pictures = (
            f"<div class={theme}>{_svg(result, kind, theme)}</div>" for theme in plots.THEMES
        )
        is_first = " open" if kind == "speedup" else ""
        parts.append(f"<details{is_first}><summary>{title}</summary>{''.join(pictures)}</details>")
    return parts


def _svg(result: Result, kind: str, theme: str) -> str:
    figure = charts.make(result, kind, theme)
    buffer = io.StringIO()
    # Glyphs as text are much smaller and searchable. The salt makes ids differ between plots.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{kind}-{theme}"}):
        figure.savefig(buffer, format="svg", facecolor=figure.get_facecolor())
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{kind}" ', 1)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(
        f"<th{' class=number' if number else ''}><button>{_text(name)}</button>"
        for name, _, number in _COLUMNS
    )
    body = "\n".join(_row(row) for row in rows)
    return (
        '<p><input type=search placeholder="filter: bf16 fwd fastattn" aria-label="filter"></p>'
        f"<div class=scroll><table><thead><tr>{head}</thead><tbody>\n{body}\n</tbody></table></div>"
    )


def _row(row: Row) -> str:
    texts = display.table_line(row)
    cell = f"<b>{_text(row['label'])}</b><br>" if row["label"] else ""
    shown = {
        "cell": f"{cell}<code>{_text(texts['cell'])}</code>",
        "ms": _text(texts["ms"]),
        "MB": _text(texts["peak MB"]),
        "speed-up": "" if row["speedup"] is None else f"{row['speedup']:.2f}×",
        "verdict": row["verdict"] or _text(" ".join([row["status"], row["reason"]]).strip()),
        "rounds": "" if row["rounds"] is None else str(row["rounds"]),
    }
    if row["ms"] is not None:
        shown["ms"] += f"<br><small>{row['ms_low']:.4g} – {row['ms_high']:.4g}"
    if row["speedup"] is not None:
        shown["speed-up"] += f"<br><small>{row['speedup_low']:.2f} – {row['speedup_high']:.2f}"
    if row["busy"]:
        shown["rounds"] += "<br><small title='ms, GFLOP/s, shares: of disturbed rounds'>busy"
    elif row["discarded"]:
        total = row["rounds"] + row["discarded"]
        shown["rounds"] += f"<br><small title='the other rounds were disturbed'>of {total}"
    if row["verdict"] is None and row["status"] == "ok":
        shown["verdict"] = "baseline" if row["provider"] == row["baseline"] else ""
    cells = []
    for name, key, number in _COLUMNS:
        value = row[key]
        sort = f' data-value="{value:.9g}"' if number and value is not None else ""
        kind = " class=number" if number else " class=verdict" if name == "verdict" else ""
        cells.append(f"<td{kind}{sort}>{shown.get(name, _text(texts.get(name, '')))}")
    mark = "WRONG" if row["status"] not in ("ok", "UNAVAILABLE", "SKIPPED") else row["verdict"]
    mark = "IMPOSSIBLE" if row["impossible"] else mark
    return f'<tr class="{mark or ""}">{"".join(cells)}'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark; --line: #d1d9e0; --faint: #59636e; --ground: #ffffff;
  --text: #1f2328; --good: #1a7f37; --bad: #cf222e; --unsure: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --faint: #9198a1;
  --ground: #0d1117; --text: #e6edf3; --good: #3fb950; --bad: #f85149; --unsure: #d29922; }
  .light { display: none } }
@media (prefers-color-scheme: light) { .dark { display: none } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1rem;
  background: var(--ground); color: var(--text); }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
.faint, small { color: var(--faint) }
details { border-top: 1px solid var(--line); padding: .5rem 0 }
summary { cursor: pointer; font-weight: 600 }
svg { max-width: 100%; height: auto } pre { overflow: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 12.5px; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .35rem; text-align: left;
  vertical-align: top }
.verdict { max-width: 15rem }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th { position: sticky; top: 0; background: var(--ground) }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap }
th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " ▲" }
th[aria-sort=descending] button::after { content: " ▼" }
input { font: inherit; padding: .3rem .6rem; width: 22rem; max-width: 100% }
.FASTER .verdict { color: var(--good); font-weight: 600 }
.SLOWER .verdict, .WRONG .verdict, .IMPOSSIBLE td { color: var(--bad) }
.UNSURE .verdict { color: var(--unsure) }
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
