"""Writes all tables and plots of measurements in the documentation from committed raw results.

    python benchmarks/render.py               writes them
    python benchmarks/render.py --check       exits with 1 if a text is out of date
    python benchmarks/render.py --page FILE   writes a page of all results, as `make docs` does

Results are in results/PROCESSOR/, and each table has a column per processor, or, where that is too
wide, there is a table for each. README.md shows models.json and, in its picture and table of calls,
of dropin.json and figures.json the one that more processors have.
A page in docs has a table where it has the markers

    <!-- RESULT: begin -->              <!-- RESULT: end -->
    <!-- RESULT OPERATOR: begin -->     <!-- RESULT OPERATOR: end -->

of all rows of RESULT.json or those of one operator. The text between the markers is never edited by
hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables
from tables import Row, side_by_side

from fastattn.bench import results, summary
from fastattn.bench.machine import processor_slug
from fastattn.bench.results import Result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
MAIN = "dropin"
ACROSS = "processors"  # the picture of README.md
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
GAIN = "<!-- gain: begin -->", "<!-- gain: end -->"

FIGURES, MODELS, BREAKDOWN = "figures", "models", "breakdown"
RANKS = "distributed"  # by benchmarks/distributed.py
PICTURE = f"""<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/images/{ACROSS}-dark.png">
  <img alt="How many times as fast as torch each call is, on each processor" src="docs/images/{ACROSS}-light.png">
</picture>"""  # noqa: E501
MARKER = re.compile(r"<!-- (\w+)(?: (\w+))?: begin -->")


def all_conditions(by_processor: dict[str, Result]) -> str:
    """The conditions of each result."""
    several = len(by_processor) > 1
    return "\n\n".join(
        (f"{name}: " if several else "") + summary.conditions(result)
        for name, result in by_processor.items()
    )


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number != 1 else ''}"


def gain_block(models: dict[str, Result]) -> str:
    """What whole models gain, and the picture."""
    gains = {processor: tables.gains(result) for processor, result in models.items()}
    ratios = (
        gain.speedup for of in gains.values() for line in of.values() for gain in line.values()
    )
    sentence = (
        "After `fastattn.accelerate` these models of transformers run "
        f"up to **{max(ratios):.1f} times** as fast as before "
        f"(inference, {on_threads(models)}; [more](docs/performance.md#whole-models)):"
    )
    note = "≈: not distinguishable from 1. –: not measured, or measured on a busy machine."
    return "\n\n".join([sentence, tables.gain_table(gains), note, PICTURE])


def why_not(result: Result, rows: Sequence[Row]) -> list[str]:
    """The reasons why a result is not valid."""
    reasons = [] if result.ended == "complete" else [f"the run was {result.ended}"]
    for what, rejected in (
        (
            "wrong or failed",
            [r for r in rows if r["status"] not in ("ok", "UNAVAILABLE", "SKIPPED")],
        ),
        ("faster than the peak", [row for row in rows if row["impossible"]]),
    ):
        if rejected:
            reasons.append(f"{len(rejected)} of {len(rows)} rows are {what}")
    return reasons


def on_most_processors(
    main: dict[str, Result], figures: dict[str, Result]
) -> tuple[str, dict[str, Result]]:
    """The result of the first screen's picture and table; of two with as many, the first."""
    return max(((MAIN, main), (FIGURES, figures)), key=lambda result: len(result[1]))


def first_speeds(shown: dict[str, Result]) -> dict[str, tables.Speeds]:
    return {processor: tables.first_speeds(result) for processor, result in shown.items()}


def readme_block(main: dict[str, Result], figures: dict[str, Result]) -> str:
    """The table of calls of README.md, from the results by processor."""
    name, shown = on_most_processors(main, figures)
    command = f"--preset {MAIN}" if name == MAIN else f"--shapes @benchmarks/{name}.txt"
    source = (
        f"{on_threads(shown)}; medians of interleaved rounds, every answer compared with float64 "
        "before it was timed. –: not measured, measured on a busy machine, or torch's own result "
        f"missed the error bound. Command: `fastattn bench run {command}`. All figures: "
        "[docs/performance.md](docs/performance.md); the raw samples: "
        "[benchmarks](benchmarks/README.md); the method: [docs/benchmarks.md](docs/benchmarks.md)."
    )
    return "\n\n".join([tables.first_table(first_speeds(shown)), source])


def on_threads(shown: dict[str, Result]) -> str:
    """The conditions that the results share."""
    threads = {_threads(result.settings["threads"]) for result in shown.values()}
    versions = {result.environment["torch"] for result in shown.values()}
    return f"{', '.join(sorted(threads))}, torch {', '.join(sorted(versions))}"


def block_of(name: str, by_processor: dict[str, Result], op: str | None = None) -> str:
    """The table of a result, or of its rows of one operator, and its conditions."""
    made = {
        processor: TABLES[name](rows_of(result, op)) for processor, result in by_processor.items()
    }
    made = {processor: table for processor, table in made.items() if table.lines}
    shown = {processor: by_processor[processor] for processor in made}
    return f"{side_by_side(made)}\n\n{all_conditions(shown)}"


def rows_of(result: Result, op: str | None) -> Result:
    """The result with the cells of one operator only; None: all of them."""
    if op is None:
        return result
    cells = [cell for cell in result.cells if cell.cell.op == op]
    if not cells:
        raise ValueError(f"no cell of this result is of the operator {op}")
    return dataclasses.replace(result, cells=cells)


def with_tables(text: str, by_processor: dict[str, dict[str, Result]]) -> str:
    """A page with the tables of its markers; one without a result stays."""
    for name, op in MARKER.findall(text):
        of_name = {processor: of[name] for processor, of in by_processor.items() if name in of}
        if of_name:
            label = f"{name} {op}" if op else name
            block = block_of(name, of_name, op or None)
            text = replaced(text, block, f"<!-- {label}: begin -->", f"<!-- {label}: end -->")
    return text


def results_page(by_processor: dict[str, dict[str, Result]]) -> str:
    parts = ["# Results", "Every number of the JSON files in `benchmarks/results`, rendered."]
    for processor, of_processor in by_processor.items():
        parts.append(f"## {processor}")
        for name, result in of_processor.items():
            rows = summary.summarise(result)
            env = result.environment
            parts += [
                f"### {processor}/{name}.json",
                f"{env['utc']}, commit {env['commit']}, Python {env['python']}, {env['system']}.",
                summary.conditions(result),
            ]
            if name == BREAKDOWN:  # its rows are parts of a call
                parts.append(side_by_side({processor: tables.breakdown_table(result)}))
            else:
                parts += [" ".join(summary.closing(result, rows)), tables.full_table(rows)]
    return "\n\n".join(parts) + "\n"


def ranks_block(by_processor: dict[str, dict[str, Any]]) -> str:
    """The counts of calls over ranks, which are the same on all processors."""
    made = {
        processor: tables.ranks_table(result["rows"]) for processor, result in by_processor.items()
    }
    conditions = [
        f"{name}, commit {of['environment']['commit']}, torch {of['environment']['torch']}: "
        f"{of['settings']['heads']} heads of {of['settings']['head_dim']}, "
        f"{of['settings']['dtype']}, causal, forward and backward."
        for name, of in by_processor.items()
    ]
    return f"{side_by_side(made)}\n\n" + " ".join(conditions)


def load_ranks() -> dict[str, dict[str, Any]]:
    """The results of benchmarks/distributed.py, by processor."""
    paths = sorted(RESULTS.glob(f"*/{RANKS}.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def load_all() -> dict[str, dict[str, Result]]:
    """All results of `fastattn bench`, by processor and name.

    Raises ValueError for a result in the folder of another processor.
    """
    by_processor: dict[str, dict[str, Result]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        if json.loads(path.read_text()).get("format") != results.FORMAT:
            continue  # of another program
        result, processor = results.load(path), path.parent.name
        if (slug := processor_slug(result.environment)) != processor:
            raise ValueError(f"{path.relative_to(RESULTS)} was measured on {slug}")
        by_processor.setdefault(processor, {})[path.stem] = result
    return by_processor


def replaced(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """`text`, with the part between the markers replaced by `block`."""
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"README.md or a page of docs has no {begin} … {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"


TABLES = {
    FIGURES: tables.figures_table,
    "isas": tables.isas_table,
    "family": tables.family_table,
    "linear": tables.family_table,
    "operators": tables.family_table,
    "options": tables.options_table,
    "serving": tables.serving_table,
    "masks": tables.serving_table,
    "server": tables.server_table,
    "steps": tables.family_table,
    BREAKDOWN: tables.breakdown_table,
    MODELS: tables.models_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a text is out of date"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write only a page of all results"
    )
    args = parser.parse_args()

    by_processor, over_ranks = load_all(), load_ranks()
    if args.page:
        args.page.write_text(results_page(by_processor))
        return 0

    def named(name: str) -> dict[str, Result]:
        return {processor: of[name] for processor, of in by_processor.items() if name in of}

    main_results = named(MAIN)
    if not main_results:
        print(f"benchmarks/results/*/{MAIN}.json is missing: see benchmarks/README.md")
        return 1
    for processor, result in main_results.items():
        if reasons := why_not(result, summary.summarise(result)):
            why = "; ".join(reasons)
            print(f"{processor}/{MAIN}.json is not valid, measure again: {why}")
            return 1
    for processor, of_processor in by_processor.items():
        for name, result in of_processor.items():
            rows = summary.summarise(result)
            if beyond := sum(bool(row["impossible"]) for row in rows):
                print(f"{processor}/{name}.json has {beyond} rows beyond the peak: measure again")
                return 1
    readme = ROOT / "README.md"
    text = replaced(readme.read_text(), readme_block(main_results, named(FIGURES)))
    texts = {readme: replaced(text, gain_block(named(MODELS)), *GAIN)}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if MARKER.search(text):
            texts[page] = with_tables(text, by_processor)
        begin, end = f"<!-- {RANKS}: begin -->", f"<!-- {RANKS}: end -->"
        if over_ranks and begin in text:
            texts[page] = replaced(texts[page], ranks_block(over_ranks), begin, end)
    if args.check:
        old = [p for p, text in texts.items() if not p.exists() or p.read_text() != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: python benchmarks/render.py")
        return 1 if old else 0
    for path, text in texts.items():
        path.write_text(text)
    import pictures  # imports matplotlib

    speeds = first_speeds(on_most_processors(main_results, named(FIGURES))[1])
    for theme in pictures.THEMES:
        pictures.save(pictures.across(speeds, theme), IMAGES / f"{ACROSS}-{theme}.png")
        pictures.draw(next(iter(main_results.values())), IMAGES / f"{MAIN}-{theme}.png", theme)
        for result in list(named(BREAKDOWN).values())[:1]:
            pictures.save(pictures.budgets(result, theme), IMAGES / f"{BREAKDOWN}-{theme}.png")
    pages = ", ".join(str(path.relative_to(ROOT)) for path in texts)
    print(f"Written: {pages}, and the pictures in {IMAGES.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
