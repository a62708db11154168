"""Writes every table and picture of measurements in the documentation from committed raw results.

    python benchmarks/render.py           writes them
    python benchmarks/render.py --check   says whether a text is out of date, and exits with 1

README.md's block and picture come from results/dropin.json, the tables of docs/performance.md from
results/figures.json, results/family.json and results/peers.json; results/README.md has every result
in full. Nothing between the markers is ever typed by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastattn.bench import display, results, summary
from fastattn.bench.results import Result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
MAIN = "dropin"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
COLUMNS = [("fp32", "fwd"), ("fp32", "fwd+bwd"), ("bf16", "fwd"), ("bf16", "fwd+bwd")]
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}

# In docs/performance.md: the result and the markers of its table have one name.
FIGURES, FAMILY, PEERS = "figures", "family", "peers"

Row = dict[str, Any]


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are text and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def speedup_table(rows: Sequence[Row]) -> str:
    """How many times faster, one line for each shape, one column for each dtype and pass."""
    cells = {(row["label"], row["dtype"], row["pass"]): row for row in rows}
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows):
        found = [cells.get((label, *column)) for column in COLUMNS]
        lines.append([label, *(f"{row['speedup']:.2f}×" if row else "–" for row in found)])
    header = ["times as fast as torch", *(f"{dtype} {PASSES[p]}" for dtype, p in COLUMNS)]
    return markdown_table(header, lines)


def full_table(rows: Sequence[Row]) -> str:
    header = ["cell", "dtype", "pass", "provider", "ms", "95 % interval", "GFLOP/s", "% of peak"]
    header += ["peak MB", "rel. error", "times as fast", "95 % interval", "rounds"]
    lines = []
    for row in rows:
        line = [_name_of(row), row["dtype"], PASSES[row["pass"]], row["provider"]]
        if row["ms"] is None:
            lines.append([*line, row["status"], *[""] * 8])
            continue
        speedup = ["", ""]
        if row["speedup"] is not None:
            speedup = [
                f"{row['speedup']:.2f}×",
                f"{row['speedup_low']:.2f} – {row['speedup_high']:.2f}",
            ]
        memory = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
        line += [f"{row['ms']:.4g}", f"{row['ms_low']:.4g} – {row['ms_high']:.4g}"]
        line += [f"{row['gflops']:.0f}", f"{row['percent_of_peak']:.0f} %", memory]
        line += [f"{row['relative_error']:.1e}", *speedup, str(row["rounds"])]
        lines.append(line)
    return markdown_table(header, lines, words=4)


def ours_compared(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["provider"] == "fastattn" and row["speedup"] is not None]


def claim(result: Result, rows: Sequence[Row]) -> str:
    """What was found, in one sentence with its conditions."""
    modules = [row for row in ours_compared(rows) if row["op"] == "mha"]
    parts = []
    for dtype in ("fp32", "bf16"):
        ratios = [row["speedup"] for row in modules if row["dtype"] == dtype]
        if ratios:
            parts.append(f"in {dtype} **{min(ratios):.1f} to {max(ratios):.1f} times**")
    env, threads = result.environment, result.settings["threads"]
    machine = f"{env['cpu']}, {threads} thread{'s' if threads != 1 else ''} ({env['isa']})"
    return (
        f"Measured on {machine}: in place of `nn.MultiheadAttention` of torch "
        f"{env['torch'].split('+')[0]}, on the shapes of BERT, ViT and a padded batch, forward and "
        f"forward + backward, the drop-in is {' and '.join(parts)} as fast. Every answer was "
        "compared with float64 before it was timed."
    )


def why_not(result: Result, rows: Sequence[Row]) -> list[str]:
    """Why a result is no evidence, in plain sentences."""
    reasons = [] if result.ended == "complete" else [f"the run was {result.ended}"]
    for what, found in (
        ("not measured", [row for row in rows if row["status"] not in ("ok", "UNAVAILABLE")]),
        ("measured on a busy machine", [row for row in rows if row["busy"]]),
        ("faster than the peak", [row for row in rows if row["impossible"]]),
    ):
        if found:
            reasons.append(f"{len(found)} of {len(rows)} rows were {what}")
    return reasons


def readme_block(result: Result, rows: Sequence[Row]) -> str:
    picture = (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="docs/images/{MAIN}-dark.png">\n'
        f'  <img alt="How many times faster than torch, and how close to the processor\'s peak" '
        f'src="docs/images/{MAIN}-light.png">\n'
        "</picture>"
    )
    source = (
        f"{display.conditions(result)} Every number with its interval: "
        "[benchmarks/results](benchmarks/results/README.md); how it is measured: "
        "[docs/benchmarks.md](docs/benchmarks.md)."
    )
    parts = [claim(result, rows), picture, speedup_table(ours_compared(rows)), source]
    return "\n\n".join(parts)


def figures_block(result: Result, rows: Sequence[Row]) -> str:
    """Share of the peak and speed against torch, a line for each shape, a column for each dtype."""
    dtypes = ("fp32", "bf16", "fp16")
    cells = {
        (_name_of(row), PASSES[row["pass"]], row["dtype"]): row
        for row in rows
        if row["provider"] == "fastattn"
    }
    lines = []
    for line in dict.fromkeys(key[:2] for key in cells):
        texts = []
        for dtype in dtypes:
            row = cells.get((*line, dtype))
            text = "" if row is None else row["status"]
            if row is not None and row["ms"] is not None:
                text = f"{row['percent_of_peak']:.0f} %"
                text += "" if row["speedup"] is None else f", {row['speedup']:.2f}×"
                text += ", busy" if row["busy"] else ""
            texts.append(text)
        lines.append([*line, *texts])
    table = markdown_table(["cell", "pass", *dtypes], lines, words=2)
    return f"{table}\n\n{display.conditions(result)}"


def family_block(result: Result, rows: Sequence[Row]) -> str:
    """Time, speed against torch, what it comes to, and the memory that each takes."""
    header = ["cell", "pass", "ms", "times as fast as torch"]
    header += ["of the peak", "GB/s", "MB", "MB, torch"]

    def key(row: Row) -> tuple[str, str, str]:
        return _name_of(row), row["dtype"], row["pass"]

    theirs = {key(row): row for row in rows if row["provider"] == "torch"}
    lines = []
    for row in rows:
        if row["provider"] != "fastattn" or row["ms"] is None:
            continue
        passes = PASSES[row["pass"]] + ("" if row["dtype"] == "fp32" else f", {row['dtype']}")
        speedup = "–" if row["speedup"] is None else f"{row['speedup']:.2f}×"
        speedup += ", busy" if row["busy"] else ""
        line = [_name_of(row), passes, f"{row['ms']:.3g}", speedup]
        line += [f"{row['percent_of_peak']:.0f} %", f"{row['gbs']:.1f}"]
        line += [f"{x['peak_mb']:.1f}" for x in (row, theirs[key(row)])]
        lines.append(line)
    return f"{markdown_table(header, lines, words=2)}\n\n{display.conditions(result)}"


def _name_of(row: Row) -> str:
    shape = f"`{row['shape']}`"
    return f"{row['label']}<br>{shape}" if row["label"] else shape


def peers_block(result: Result, rows: Sequence[Row]) -> str:
    """How many times as fast fastattn is as each peer in its best mode, one line for each cell.

    fastattn is the baseline of that run, so a peer's speed-up is turned over.
    """
    by_cell: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["busy"]:
            continue
        name = row["provider"].partition("@")[0]
        best = by_cell.setdefault(_name_of(row), {})
        if row["ms"] is not None and (name not in best or row["ms"] < best[name]["ms"]):
            best[name] = row
    peers = list(dict.fromkeys(row["provider"].partition("@")[0] for row in rows))
    peers.remove("fastattn")
    lines = []
    for name, found in by_cell.items():
        ours = found.get("fastattn")
        line = [name, f"{ours['ms']:.4g}" if ours else "–"]
        for peer in peers:
            row = found.get(peer)
            line.append("–" if row is None or row["speedup"] is None else _turned_over(row))
        lines.append(line)
    header = ["cell", "fastattn, ms", *(f"times as fast as {peer}" for peer in peers)]
    versions = "; ".join(
        f"{package} {version}"
        for name, provider in result.providers.items()
        if "@" not in name
        for package, version in provider.get("versions", {}).items()
        if package != "fastattn"
    )
    parts = [markdown_table(header, lines), f"{versions}. {display.conditions(result)}"]
    return "\n\n".join(parts)


def _turned_over(row: Row) -> str:
    low, high = 1 / row["speedup_high"], 1 / row["speedup_low"]
    return f"{1 / row['speedup']:.2f}× [{low:.2f}, {high:.2f}]"


def results_page(found: dict[str, Result]) -> str:
    parts = ["# Results", "Written by `python benchmarks/render.py` from the JSON files here."]
    for name, result in found.items():
        rows = summary.summarise(result)
        env = result.environment
        parts += [
            f"## {name}.json",
            f"{env['utc']}, commit {env['commit']}, Python {env['python']}, {env['system']}.",
            display.conditions(result),
            " ".join(display.closing(result, rows)),
            full_table(rows),
        ]
    return "\n\n".join(parts) + "\n"


def replaced(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between the markers replaced by `block`."""
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"README.md or docs/performance.md has no {begin} … {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check

    found = {path.stem: results.load(path) for path in sorted(RESULTS.glob("*.json"))}
    if MAIN not in found:
        print(f"benchmarks/results/{MAIN}.json is missing: see benchmarks/README.md")
        return 1
    rows = summary.summarise(found[MAIN])
    if reasons := why_not(found[MAIN], rows):
        print(f"{MAIN}.json is no evidence, measure again: {'; '.join(reasons)}")
        return 1
    readme = ROOT / "README.md"
    block = readme_block(found[MAIN], rows)
    texts = {
        readme: replaced(readme.read_text(), block),
        RESULTS / "README.md": results_page(found),
    }
    page = ROOT / "docs" / "performance.md"
    text = page.read_text()
    for name, block_of in (
        (FIGURES, figures_block),
        (FAMILY, family_block),
        (PEERS, peers_block),
    ):
        if name in found:
            block = block_of(found[name], summary.summarise(found[name]))
            text = replaced(text, block, f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    texts[page] = text
    if check:
        old = [p for p, text in texts.items() if not p.exists() or p.read_text() != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: python benchmarks/render.py")
        return 1 if old else 0
    for path, text in texts.items():
        path.write_text(text)
    from fastattn.bench import plots

    for theme in plots.THEMES:
        plots.draw(found[MAIN], IMAGES / f"{MAIN}-{theme}.png", theme)
    print(f"Written: README.md, benchmarks/results/README.md and the pictures in {IMAGES.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
