"""Writes every table and picture of measurements in the documentation from committed raw results.

    python benchmarks/render.py           writes them
    python benchmarks/render.py --check   says whether a text is out of date, and exits with 1

A result lies in results/PROCESSOR/, and each table has a column for each processor that has one.
README.md's block comes from dropin.json (the picture from the first processor's) and models.json,
the tables of docs/performance.md from figures.json, models.json, family.json and peers.json;
results/README.md has every result in full. Nothing between the markers is ever typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastattn.bench import display, results, summary
from fastattn.bench.environment import processor_slug
from fastattn.bench.results import Result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
MAIN = "dropin"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
COLUMNS = [("fp32", "fwd"), ("fp32", "fwd+bwd"), ("bf16", "fwd"), ("bf16", "fwd+bwd")]
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}

# In docs/performance.md: the result and the markers of its table have one name.
FIGURES, FAMILY, PEERS, MODELS = "figures", "family", "peers", "models"

Row = dict[str, Any]


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are text and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


class Table(NamedTuple):
    """A table of one processor: what its lines are, and the values that they have."""

    words: list[str]
    values: list[str]
    lines: dict[tuple[str, ...], list[str]]


def side_by_side(tables: dict[str, Table]) -> str:
    """One table: of several processors each value has a column a processor."""
    if len(tables) == 1:
        (table,) = tables.values()
        lines = [[*words, *values] for words, values in table.lines.items()]
        return markdown_table([*table.words, *table.values], lines, words=len(table.words))
    values = list(dict.fromkeys(v for table in tables.values() for v in table.values))
    header = [f"{value}<br>{name}" for value in values for name in tables]
    keys = dict.fromkeys(key for table in tables.values() for key in table.lines)
    found = {
        (key, value, name): text
        for name, table in tables.items()
        for key, texts in table.lines.items()
        for value, text in zip(table.values, texts, strict=True)
    }
    lines = [
        [*key, *(found.get((key, value, name), "–") for value in values for name in tables)]
        for key in keys
    ]
    words = next(iter(tables.values())).words
    return markdown_table([*words, *header], lines, words=len(words))


def all_conditions(found: dict[str, Result]) -> str:
    """Under what conditions each of the results was measured."""
    several = len(found) > 1
    return "\n\n".join(
        (f"{name}: " if several else "") + display.conditions(result)
        for name, result in found.items()
    )


def speedup_table(rows: Sequence[Row]) -> Table:
    """How many times faster, one line for each shape, one column for each dtype and pass."""
    cells = {(row["label"], row["dtype"], row["pass"]): row for row in rows}
    lines = {}
    for label in dict.fromkeys(row["label"] for row in rows):
        found = [cells.get((label, *column)) for column in COLUMNS]
        lines[label,] = [f"{row['speedup']:.2f}×" if row else "–" for row in found]
    header = [f"{dtype} {PASSES[p]}" for dtype, p in COLUMNS]
    return Table(["times as fast as torch"], header, lines)


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
    machine = env.get("gpu") or env["cpu"]
    machine += f", {threads} thread{'s' if threads != 1 else ''} ({env['isa']})"
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


def readme_block(found: dict[str, Result], models: dict[str, Result] | None = None) -> str:
    rows = {name: summary.summarise(result) for name, result in found.items()}
    picture = (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="docs/images/{MAIN}-dark.png">\n'
        f'  <img alt="How many times faster than torch, and how close to the processor\'s peak" '
        f'src="docs/images/{MAIN}-light.png">\n'
        "</picture>"
    )
    source = (
        f"{all_conditions(found)} Every number with its interval: "
        "[benchmarks/results](benchmarks/results/README.md); how it is measured: "
        "[docs/benchmarks.md](docs/benchmarks.md)."
    )
    claims = [claim(result, rows[name]) for name, result in found.items()]
    tables = {name: speedup_table(ours_compared(rows[name])) for name in found}
    whole = (
        [side_by_side({n: gains_table(result) for n, result in models.items()})] if models else []
    )
    return "\n\n".join([*claims, picture, side_by_side(tables), *whole, source])


def gains_table(result: Result) -> Table:
    """Of whole models: the speed-up, and what it would be if attention took no time."""
    dtypes = ["fp32", "bf16"]
    found = stock_and_ours(result)
    lines = {}
    for label, passes in dict.fromkeys(key[:2] for key in found):
        name = label if passes == "fwd" else f"{label}, {PASSES[passes]}"
        pairs = (found.get((label, passes, dtype)) for dtype in dtypes)
        lines[name,] = [_gain(*pair) if pair else "–" for pair in pairs]
    return Table(["whole models of transformers: times as fast, of at most"], dtypes, lines)


def _gain(stock: Row, ours: Row) -> str:
    busy = ", busy" if ours["busy"] else ""
    return f"{ours['speedup']:.2f}× of {stock['speedup_limit']:.2f}×{busy}"


def stock_and_ours(result: Result) -> dict[tuple[str, str, str], tuple[Row, Row]]:
    """The two rows of each whole model that was compared, by its label, pass and dtype."""
    rows: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in summary.summarise(result):
        rows.setdefault((row["label"], row["pass"], row["dtype"]), {})[row["provider"]] = row
    return {
        key: (found["torch"], found["fastattn"])
        for key, found in rows.items()
        if found.get("fastattn", {}).get("speedup") is not None
    }


def models_table(result: Result) -> Table:
    """Of whole models: rates, the speed-up with its interval, what it can be, and memory."""
    values = ["a second, torch", "fastattn", "times as fast", "at most", "attention, torch"]
    values += ["fastattn", "MB, torch", "fastattn"]
    lines = {}
    for (label, passes, dtype), (stock, ours) in stock_and_ours(result).items():
        speedup = f"{ours['speedup']:.2f}× [{ours['speedup_low']:.2f}, {ours['speedup_high']:.2f}]"
        both = (stock, ours)
        lines[label, PASSES[passes], dtype] = [
            *(f"{display.milliseconds(row['items_per_second'])} {row['item']}" for row in both),
            speedup + (", busy" if ours["busy"] else ""),
            f"{stock['speedup_limit']:.2f}×",
            *(f"{100 * row['attention_share']:.1f} %" for row in both),
            *(f"{row['peak_mb']:.0f}" for row in both),
        ]
    return Table(["model", "pass", "dtype"], values, lines)


def figures_table(result: Result) -> Table:
    """Share of the peak and speed against torch, a line for each shape, a column for each dtype."""
    dtypes = ["fp32", "bf16", "fp16"]
    cells = {
        (_name_of(row), PASSES[row["pass"]], row["dtype"]): row
        for row in summary.summarise(result)
        if row["provider"] == "fastattn"
    }
    lines = {}
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
        lines[line] = texts
    return Table(["cell", "pass"], dtypes, lines)


def family_table(result: Result) -> Table:
    """Time, speed against torch, what it comes to, and the memory that each takes."""
    values = ["ms", "times as fast as torch", "of the peak", "GB/s", "MB", "MB, torch"]
    rows = summary.summarise(result)

    def key(row: Row) -> tuple[str, str, str]:
        return _name_of(row), row["dtype"], row["pass"]

    theirs = {key(row): row for row in rows if row["provider"] == "torch"}
    lines = {}
    for row in rows:
        if row["provider"] != "fastattn" or row["ms"] is None:
            continue
        passes = PASSES[row["pass"]] + ("" if row["dtype"] == "fp32" else f", {row['dtype']}")
        speedup = "–" if row["speedup"] is None else f"{row['speedup']:.2f}×"
        speedup += ", busy" if row["busy"] else ""
        lines[_name_of(row), passes] = [
            *(f"{row['ms']:.3g}", speedup, f"{row['percent_of_peak']:.0f} %", f"{row['gbs']:.1f}"),
            *(f"{x['peak_mb']:.1f}" for x in (row, theirs[key(row)])),
        ]
    return Table(["cell", "pass"], values, lines)


def _name_of(row: Row) -> str:
    shape = f"`{row['shape']}`"
    return f"{row['label']}<br>{shape}" if row["label"] else shape


def peers_table(result: Result) -> Table:
    """How many times as fast fastattn is as each peer in its best mode, one line for each cell.

    fastattn is the baseline of that run, so a peer's speed-up is turned over.
    """
    rows = summary.summarise(result)
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
    lines = {}
    for name, found in by_cell.items():
        ours = found.get("fastattn")
        line = [f"{ours['ms']:.4g}" if ours else "–"]
        for peer in peers:
            row = found.get(peer)
            line.append("–" if row is None or row["speedup"] is None else _turned_over(row))
        lines[name,] = line
    values = ["fastattn, ms", *(f"times as fast as {peer}" for peer in peers)]
    return Table(["cell"], values, lines)


def versions_of_peers(found: dict[str, Result]) -> str:
    told = {
        f"{package} {version}": None
        for result in found.values()
        for name, provider in result.providers.items()
        if "@" not in name
        for package, version in provider.get("versions", {}).items()
        if package != "fastattn"
    }
    return "; ".join(told)


def block_of(name: str, found: dict[str, Result]) -> str:
    """The table of docs/performance.md of this name, and its conditions."""
    tables = {processor: TABLES[name](result) for processor, result in found.items()}
    versions = f"{versions_of_peers(found)}. " if name == PEERS else ""
    return f"{side_by_side(tables)}\n\n{versions}{all_conditions(found)}"


def _turned_over(row: Row) -> str:
    low, high = 1 / row["speedup_high"], 1 / row["speedup_low"]
    return f"{1 / row['speedup']:.2f}× [{low:.2f}, {high:.2f}]"


def results_page(found: dict[str, dict[str, Result]]) -> str:
    parts = ["# Results", "Written by `python benchmarks/render.py` from the JSON files here."]
    for processor, of_processor in found.items():
        parts.append(f"## {processor}")
        for name, result in of_processor.items():
            rows = summary.summarise(result)
            env = result.environment
            parts += [
                f"### {processor}/{name}.json",
                f"{env['utc']}, commit {env['commit']}, Python {env['python']}, {env['system']}.",
                display.conditions(result),
                " ".join(display.closing(result, rows)),
                full_table(rows),
            ]
    return "\n\n".join(parts) + "\n"


def lies_elsewhere(processor: str, result: Result) -> str:
    """Where a result belongs that was not measured on the processor of its folder; else nothing."""
    slug = processor_slug(result.environment)
    if slug == processor:
        return ""
    # Older records do not tell the generation, which stands before the instruction set.
    if "cpu_family" not in result.environment and "gpu" not in result.environment:
        name, _, feature = slug.rpartition("-")
        if processor.startswith(f"{name}-") and processor.endswith(f"-{feature}"):
            return ""
    return slug


def load_all() -> dict[str, dict[str, Result]]:
    """Every result of `fastattn bench`, by processor and by name; raises ValueError for one that
    lies in the folder of another processor."""
    found: dict[str, dict[str, Result]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        if json.loads(path.read_text()).get("format") != results.FORMAT:
            continue  # of another program, such as gpu.py
        result, processor = results.load(path), path.parent.name
        if elsewhere := lies_elsewhere(processor, result):
            raise ValueError(f"{path.relative_to(RESULTS)} was measured on {elsewhere}")
        found.setdefault(processor, {})[path.stem] = result
    return found


def replaced(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between the markers replaced by `block`."""
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"README.md or docs/performance.md has no {begin} … {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"


TABLES = {
    FIGURES: figures_table,
    FAMILY: family_table,
    PEERS: peers_table,
    MODELS: models_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check

    found = load_all()

    def named(name: str) -> dict[str, Result]:
        return {processor: of[name] for processor, of in found.items() if name in of}

    main_results = named(MAIN)
    if not main_results:
        print(f"benchmarks/results/*/{MAIN}.json is missing: see benchmarks/README.md")
        return 1
    for processor, result in main_results.items():
        if reasons := why_not(result, summary.summarise(result)):
            why = "; ".join(reasons)
            print(f"{processor}/{MAIN}.json is no evidence, measure again: {why}")
            return 1
    for processor, of_processor in found.items():
        for name, result in of_processor.items():
            rows = summary.summarise(result)
            if beyond := sum(bool(row["impossible"]) for row in rows):
                print(f"{processor}/{name}.json has {beyond} rows beyond the peak: measure again")
                return 1
    readme = ROOT / "README.md"
    texts = {
        readme: replaced(readme.read_text(), readme_block(main_results, named(MODELS))),
        RESULTS / "README.md": results_page(found),
    }
    page = ROOT / "docs" / "performance.md"
    text = page.read_text()
    for name in TABLES:
        if of_name := named(name):
            block = block_of(name, of_name)
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
        plots.draw(next(iter(main_results.values())), IMAGES / f"{MAIN}-{theme}.png", theme)
    print(f"Written: README.md, benchmarks/results/README.md and the pictures in {IMAGES.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
