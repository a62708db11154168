"""`fastattn bench run` and `model`: from arguments to a run, from its result to the files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattn.bench import display, ops, results, runner, summary
from fastattn.bench.cells import Cell
from fastattn.bench.environment import describe_environment, processor_slug
from fastattn.bench.providers import check_name
from fastattn.bench.results import Result
from fastattn.bench.selection import cells_of, check_names
from fastattn.bench.workers import usable_cpus

# The exit codes, see docs/benchmarks.md.
OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130
PROCESSOR = "{processor}"
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
    rows = summary.summarise(result)
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
    rows: list[summary.Row],
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


def exit_code(ended: str, rows: Sequence[summary.Row]) -> int:
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
