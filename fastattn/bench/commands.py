"""The commands of `bench`: from arguments to a run, and from its result to files and text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattn.bench import compare as comparing
from fastattn.bench import display, ops, peaks, results, runner
from fastattn.bench.cells import Cell
from fastattn.bench.environment import describe_environment, processor_slug
from fastattn.bench.presets import PRESETS, WHOLE_MODELS
from fastattn.bench.providers import PROVIDERS, check_name, load, variants
from fastattn.bench.results import Result
from fastattn.bench.rounds import QUIET_SHARE
from fastattn.bench.selection import cells_of, check_names
from fastattn.bench.shapes import parse_line
from fastattn.bench.summary import Row, summarise
from fastattn.bench.workers import usable_cpus

# The exit codes, see docs/benchmarks.md.
OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130
PROCESSOR = "{processor}"
PLOTS = ("speedup", "time", "roofline")
PICTURES = (".png", ".svg", ".pdf")


def model(args: argparse.Namespace) -> int:
    """Measure whole models with PyTorch's attention and with that of fastattn.

    Sizes are those of real models, weights are random: nothing is downloaded. "attention" is the
    share of a model's time that its attention takes; "at most" is the speed-up of the model if its
    attention took no time. A training step (--pass fwd+bwd) has no dropout and no optimizer.
    """
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure operators and modules. Every result is compared with fp64 before it is timed."""
    for name in args.providers:
        check_name(name)
    cells = [dataclasses.replace(cell, device=args.device) for cell in cells_of(args)]
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here")
    metrics = args.metric or display.default_metrics(cells)
    check_names("--metric", metrics, tuple(display.METRICS))
    _check_settings(args)
    _require(cells)
    out = placed(args.out, args.device)
    if args.plot:
        check_picture(args.plot)
    settings = runner.Settings(
        cells=cells,
        providers=list(dict.fromkeys(args.providers)),
        baseline=args.baseline or ("torch" if "torch" in args.providers else args.providers[0]),
        cache=args.cache,
        seed=args.seed,
        time_budget=args.time_budget,
        rounds=args.rounds,
        timeout=args.timeout,
        **({"threads": args.threads} if args.threads else {}),
    )
    journal_path = out / "results.jsonl" if out else None

    def earlier(now: Result) -> Result | None:
        return results.resumable(journal_path, now) if journal_path and args.resume else None

    progress = display.Progress(None if args.quiet else sys.stderr)
    measuring = runner.Runner(settings, progress, earlier)
    with results.Journal(journal_path) as journal:
        result = measuring.run(journal)
    rows = summarise(result)
    display.print_result(result, rows, metrics)
    failures = [journal.failure] if journal.failure else []
    failures += _write(args, out, result, rows, metrics)
    for failure in failures:
        print(f"Not written: {failure.filename}: {failure.strerror}", file=sys.stderr)
    return UNWRITTEN if failures else exit_code(result.ended, rows)


def _write(
    args: argparse.Namespace,
    out: Path | None,
    result: Result,
    rows: list[Row],
    metrics: Sequence[str],
) -> list[OSError]:
    """Writes the files that the arguments name; returns what went wrong."""
    is_timed = any(row["ms"] is not None for row in rows)
    written, failures = [], []
    writers: list[tuple[Path | None, str, Callable[[Path], Any]]] = [
        (args.json, "json", lambda path: results.save_json(result, rows, path)),
        (args.csv, "csv", lambda path: results.save_csv(rows, path)),
        (args.markdown, "md", lambda path: display.save_markdown(result, rows, path, metrics)),
    ]
    if is_timed:
        writers.append((args.plot, "png", lambda path: draw(result, path)))
    for given, suffix, write in writers:
        path = placed(given, args.device) or (out / f"results.{suffix}" if out else None)
        if path is None:
            continue
        try:
            if write(path) is not False:
                written.append(str(path))
        except OSError as error:
            error.filename = error.filename or str(path)
            failures.append(error)
    if written:
        print(f"Written: {', '.join(written)}")
    return failures


def _require(cells: Sequence[Cell]) -> None:
    """Raises ValueError, which says what to install, if no cell can be measured without it.

    Of several libraries some may be missing: their rows say so.
    """
    missing = [ops.missing(op) for op in dict.fromkeys(cell.op for cell in cells)]
    if missing and all(missing):
        raise ValueError(missing[0])


def placed(path: Path | None, device: str = "cpu") -> Path | None:
    """`path`, with {processor} replaced by the folder name of this machine."""
    if path is None or PROCESSOR not in str(path):
        return path
    return Path(str(path).replace(PROCESSOR, processor_slug(describe_environment(device))))


def exit_code(ended: str, rows: Sequence[Row]) -> int:
    """The exit code of the run; prints to stderr why a run is not valid."""
    if ended == "interrupted":
        return INTERRUPTED
    if not any(row["ms"] is not None for row in rows):
        print("Nothing was measured; every row has the reason.", file=sys.stderr)
        return FAULTS
    impossible = [row for row in rows if row["impossible"]]
    for row in impossible:
        print(
            f"IMPOSSIBLE: {display.cell_words(row)} {row['dtype']} {row['pass']}: "
            f"{row['provider']} ran at {row['percent_of_peak']:.0f} % of the peak measured beside "
            f"it, 95 % interval {row['percent_low']:.0f} to {row['percent_high']:.0f} %",
            file=sys.stderr,
        )
    faults = {"WRONG", "ERROR", "CRASHED", "HUNG"}
    return FAULTS if impossible or any(row["status"] in faults for row in rows) else OK


def check_picture(path: Path) -> None:
    """Raises ValueError for a suffix that matplotlib cannot write."""
    if path.suffix not in PICTURES:
        raise ValueError(f"--plot {path}: the name must end with {', '.join(PICTURES)}")


def check_threads(threads: int | None) -> int:
    """The number of threads. Raises ValueError for more than processors, which would wait."""
    usable = len(usable_cpus(10**6))
    if threads is not None and (threads < 1 or threads > (usable or threads)):
        raise ValueError(f"--threads {threads}: from 1 to {usable or 'as many as there are'}")
    return threads or torch.get_num_threads()


def draw(result: Result, path: Path, kind: str = "speedup", theme: str = "light") -> bool:
    """Writes the plot and returns True; without matplotlib, prints a message and returns False."""
    try:
        from fastattn.bench import plots
    except ImportError:
        print(
            f"No plot {path}: matplotlib is missing (pip install 'fastattn[bench]')",
            file=sys.stderr,
        )
        return False
    plots.draw(result, path, kind, theme)
    return True


def _check_settings(args: argparse.Namespace) -> None:
    """Raises ValueError, which names the wrong argument."""
    check_threads(args.threads)
    for flag, value in (
        ("--time-budget", args.time_budget),
        ("--rounds", args.rounds),
        ("--timeout", args.timeout),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} {value}: must be a positive number")
    if args.resume and not args.out:
        raise ValueError("--resume: give the --out DIR of the run to continue")
    if args.baseline is not None and args.baseline not in args.providers:
        among = ",".join(args.providers)
        raise ValueError(f"--baseline {args.baseline!r} is not among --providers {among}")


def list_all(args: argparse.Namespace) -> int:
    """List operators, whole models, presets and providers, and why a provider is unavailable."""
    print("Operators (--op)")
    for name in ops.OPS:
        op = ops.get(name)
        keys = ",".join(f"{key}={default}" for key, default in op.SIZES.items())
        print(f"  {name:<20}{op.FUNCTION}: {op.ABOUT}\n{'':<22}{keys}; torch: {op.TORCH}")
    print("\nWhole models (bench model NAME)")
    for name, lines in WHOLE_MODELS.items():
        for line in map(parse_line, lines):
            op = ops.get(line.op)
            print(f"  {name:<20}{line.label}: {op.FUNCTION}, {line.op} {line.shape}")
    print("\nPresets (--preset)")
    for name, (about, _) in PRESETS.items():
        print(f"  {name:<20}{about}")
    print("\nProviders (--providers)")
    for name in PROVIDERS:
        provider = load(name)
        try:
            versions = provider.versions()
            about = ", ".join(f"{package} {version}" for package, version in versions.items())
        except Exception as error:  # also covers a broken installation
            about = f"unavailable: {error}"
        print(f"  {name:<20}{provider.ABOUT}\n{'':<22}{about}")
        if known := variants(name):
            print(f"{'':<22}{', '.join(f'{name}@{variant}' for variant in known)}")
    return OK


def compare(args: argparse.Namespace) -> int:
    """Compare two results row by row, and show which conditions differ."""
    before, after = (results.load(path) for path in (args.before, args.after))
    found, alone = comparing.changes(before, after, args.metric)
    if args.providers:
        known = list(dict.fromkeys(change.provider for change in found))
        for name in args.providers:
            if name not in known:
                raise ValueError(f"--providers {name!r}: in both results are {', '.join(known)}")
        found = [change for change in found if change.provider in args.providers]
    for line in comparing.differences(before, after):
        print(f"Different conditions: {line}")
    if not found:
        raise ValueError(
            f"{args.before} and {args.after} have no row with a {args.metric} in common"
        )
    form = display.milliseconds if args.metric == "time" else "{:.3g}".format
    print(f"{'before':>9} {'after':>9}  {'times as good':<23} {args.metric} of")
    for change in sorted(found, key=lambda change: change.ratio):
        interval = f"{change.ratio:5.2f}× [{change.low:.2f}, {change.high:.2f}]"
        numbers = f"{form(change.before):>9} {form(change.after):>9}"
        busy = ", busy" if change.busy else ""
        print(f"{numbers}  {interval:<23} {change.name}: {change.verdict}{busy}")
    verdicts = [change.verdict for change in found]
    print(
        f"{len(found)} rows: {verdicts.count('FASTER')} better, {verdicts.count('SLOWER')} worse, "
        f"{verdicts.count('SAME')} the same, {verdicts.count('UNSURE')} unsure."
    )
    if alone:
        print(f"{len(alone)} rows are in one result alone: {'; '.join(alone)}")
    if args.fail_slower is None:
        return OK
    failed = [change for change in found if change.is_slower_than(args.fail_slower)]
    for change in failed:
        print(f"WORSE by more than {args.fail_slower:.0%}: {change.name}", file=sys.stderr)
    return FAULTS if failed else OK


def plot(args: argparse.Namespace) -> int:
    """Plot a result."""
    if args.plot:
        check_picture(args.plot)
    result = results.load(args.results)
    kinds = PLOTS if args.metric == "all" else (args.metric,)
    for kind in kinds:
        name = args.results.with_suffix(".png") if args.plot is None else args.plot
        if args.metric == "all" or (args.plot is None and kind != "speedup"):
            name = name.with_name(f"{name.stem}-{kind}{name.suffix}")
        if not draw(result, name, kind, args.theme):
            return FAULTS
        print(f"Written: {name}")
    return OK


def report(args: argparse.Namespace) -> int:
    """Write a result as one self-contained HTML file."""
    try:
        from fastattn.bench import report as html
    except ImportError:
        print("a report needs matplotlib: pip install 'fastattn[bench]'", file=sys.stderr)
        return FAULTS
    path = args.out or args.results.with_suffix(".html")
    html.write(results.load(args.results), path, args.title)
    print(f"Written: {path}")
    return OK


def roofline(args: argparse.Namespace) -> int:
    """Measure the peaks of this machine, or compare a result with its own (a roofline)."""
    if args.results is None:
        if args.plot:
            raise ValueError("--plot needs a result: the peaks alone have no plot")
        threads = check_threads(args.threads)
        torch.set_num_threads(threads)
        print(f"{threads} thread{'s' if threads > 1 else ''}")
        rates, share = peaks.measure_all(threads)
        print("\n".join(peaks.roof_lines(rates)))
        if share < QUIET_SHARE:
            print(f"Other processes took up to {1 - share:.0%} of the cores: measure again.")
        return OK
    if args.plot:
        check_picture(args.plot)
    result = results.load(args.results)
    print("\n".join([*peaks.roof_lines(result.peaks), "", *peaks.cell_lines(summarise(result))]))
    if args.plot and draw(result, args.plot, "roofline"):
        print(f"Written: {args.plot}")
    return OK


def record(args: argparse.Namespace) -> int:
    """Run a Python program and record the shapes of its attention calls, with their counts.

    `bench run --shapes @FILE` measures them. The exit code is that of the program.
    """
    from fastattn.bench import recording

    return recording.run_program(args.program, args.out)


def breakdown(args: argparse.Namespace) -> int:
    """Measure where the time of small calls goes: checks, adapter, autograd, kernel, ...

    A time is the difference of two nested parts of the real call, on the CPU. Every result is
    compared with fp64 first.
    """
    from fastattn.bench import breakdown as parts

    threads = check_threads(args.threads)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: must be at least 1")
    if args.plot:
        check_picture(args.plot)
    path = placed(args.json)
    result = parts.measure(cells_of(args), threads=threads, rounds=args.rounds, seed=args.seed)
    print("\n".join(parts.lines(result)))
    if path:
        results.save_json(result, summarise(result), path)
        print(f"Written: {path}")
    if args.plot and draw(result, args.plot, "breakdown"):
        print(f"Written: {args.plot}")
    wrong = [found for found in result.cells if found.outcomes["call"].status != "ok"]
    for found in wrong:
        print(f"WRONG: {found.cell.name}: {found.outcomes['call'].reason}", file=sys.stderr)
    return FAULTS if wrong else OK


def env(args: argparse.Namespace) -> int:
    """Print the environment that every result file records, as JSON.

    `processor` is the folder of its results, which replaces {processor} in output paths.
    """
    environment = describe_environment()
    facts = {"processor": processor_slug(environment), **environment}
    print(json.dumps(facts, indent=1))
    return OK
