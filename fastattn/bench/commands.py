"""The commands of `bench`: from arguments to a run, and from its result to files and text."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastattn.bench import ops, recording, results, runner, summary
from fastattn.bench.machine import describe_environment, processor_slug
from fastattn.bench.providers import PROVIDERS, check_name, load, variants
from fastattn.bench.results import CellResult, Result
from fastattn.bench.selection import PRESETS, WHOLE_MODELS, cells_of, check_names
from fastattn.bench.summary import Row, summarise
from fastattn.bench.worker import usable_cpus

# The exit codes, see docs/benchmarks.md.
OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130
PICTURES = (".png", ".svg", ".pdf")
NO_PLOTS = "matplotlib is missing (pip install 'fastattn[bench]')"
# The metrics of `compare`, and their columns: a value, and the ends of its interval if it has one.
METRICS = {
    "time": ("ms", "ms_low", "ms_high"),
    "speedup": ("speedup", "speedup_low", "speedup_high"),
    "memory": ("peak_mb",),
    "error": ("relative_error",),
}


def model(args: argparse.Namespace) -> int:
    """Measure whole models of PyTorch and after ``fastattn.accelerate``.

    Models have real sizes and random weights: nothing is downloaded. "attention" is the share of a
    model's time that its attention takes; "by it at most" is the speed-up of the model if its
    attention took no time and all else were PyTorch's. A training step (--pass fwd+bwd) has no
    dropout and no optimizer.
    """
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure operators and modules. Every result is compared with fp64 before it is timed."""
    for name in args.providers:
        check_name(name)
    args.cells = cells = [replace(cell, device=args.device) for cell in cells_of(args)]
    metrics = args.metric or summary.default_metrics(cells)
    check_names("--metric", metrics, tuple(summary.METRICS))
    args.threads = check_threads(args.threads)
    args.providers = list(dict.fromkeys(args.providers))
    args.baseline = args.baseline or ("torch" if "torch" in args.providers else args.providers[0])
    _check_run(args)
    # Some of several libraries may be missing; their rows say so.
    missing = [ops.missing(op) for op in dict.fromkeys(cell.op for cell in cells)]
    if all(missing):
        raise ValueError(missing[0])
    settings = runner.Settings(**{n: vars(args)[n] for n in runner.Settings.__annotations__})
    folder = placed(args.out, args.device)
    saved, earlier = folder and folder / "results.json", None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    if args.resume and saved and saved.exists():
        earlier = results.load(saved)
        if differ := results.differences(earlier, settings.new_result()):
            raise ValueError(f"--resume: {saved} was measured with another {'; '.join(differ)}")

    def measured(result: Result, found: CellResult) -> None:
        if summary.was_skipped(found):
            return
        if not args.quiet:
            print(summary.progress(result, found, len(cells)), file=sys.stderr, flush=True)
        if saved:
            # Replaced atomically, so a killed run keeps the cells measured before. A full disk must
            # not prevent the table of a run, so it is reported at the end.
            part = saved.with_suffix(".part")
            with contextlib.suppress(OSError):
                results.save_json(result, summarise(result), part)
                part.replace(saved)

    result = runner.Runner(settings, earlier, measured).run()
    rows = summarise(result)
    text = summary.page(result, rows, metrics)
    print(text)
    writers: dict[str, Callable[[Path], Any]] = {
        "json": partial(results.save_json, result, rows),
        "csv": partial(results.save_csv, rows),
        "md": lambda path: path.write_text(text),
    }
    if any(row["ms"] is not None for row in rows) and find_spec("matplotlib"):
        writers["png"] = partial(draw, result)
    elif folder:
        print(f"No plot: nothing was measured, or {NO_PLOTS}", file=sys.stderr)
    files = {folder / f"results.{kind}": write for kind, write in writers.items() if folder}
    if path := placed(args.json, args.device):
        files[path] = writers["json"]
    written = [_written(path, write) for path, write in files.items()]
    return exit_code(result.ended, rows) if all(written) else UNWRITTEN


def _check_run(args: argparse.Namespace) -> None:
    """Raises ValueError, which names the wrong argument."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here")
    for flag in ("--time-budget", "--rounds", "--timeout"):
        value = getattr(args, flag[2:].replace("-", "_"))
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} {value}: must be a positive number")
    if args.resume and not args.out:
        raise ValueError("--resume: give the --out DIR of the run to continue")
    if args.baseline not in args.providers:
        among = ",".join(args.providers)
        raise ValueError(f"--baseline {args.baseline!r} is not among --providers {among}")


def _written(path: Path, write: Callable[[Path], Any]) -> bool:
    """Writes a file, and says so; False if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        print(f"Written: {path}")
    except OSError as error:
        print(f"Not written: {error.filename or path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def placed(path: Path | None, device: str = "cpu") -> Path | None:
    """`path`, with {processor} replaced by the folder name of this machine."""
    if path is None or "{processor}" not in str(path):
        return path
    return Path(str(path).replace("{processor}", processor_slug(describe_environment(device))))


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
            f"IMPOSSIBLE: {summary.cell_words(row)} {row['dtype']} {row['pass']}: "
            f"{row['provider']} ran at {row['percent_of_peak']:.0f} % of the peak measured beside "
            f"it, 95 % interval {row['percent_low']:.0f} to {row['percent_high']:.0f} %",
            file=sys.stderr,
        )
    return FAULTS if impossible or any(map(summary.is_fault, rows)) else OK


def check_picture(path: Path | None) -> None:
    """Raises ValueError for a suffix that matplotlib cannot write, or without matplotlib."""
    if path and path.suffix not in PICTURES:
        raise ValueError(f"--plot {path}: the name must end with {', '.join(PICTURES)}")
    if path and not find_spec("matplotlib"):
        raise ValueError(f"--plot {path}: {NO_PLOTS}")


def check_threads(threads: int | None) -> int:
    """The number of threads. Raises ValueError for more than processors, which would wait."""
    usable = len(usable_cpus(10**6))
    if threads is not None and (threads < 1 or threads > (usable or threads)):
        raise ValueError(f"--threads {threads}: from 1 to {usable or 'as many as there are'}")
    return threads or torch.get_num_threads()


def draw(result: Result, path: Path, **look: str) -> None:
    from fastattn.bench import plots  # imports matplotlib

    plots.draw(result, path, **look)


def list_all(args: argparse.Namespace) -> int:
    """List operators, whole models, presets and providers, and why a provider is unavailable."""
    operators = {}
    for name, op in ((name, ops.get(name)) for name in ops.OPS):
        keys = ",".join(f"{key}={default}" for key, default in op.SIZES.items())
        shapes = ", ".join(f"{x} [{', '.join(sizes.split())}]" for x, sizes in op.SHAPES.items())
        about = f"{op.FUNCTION}: {op.ABOUT}" + f"; {shapes}" * bool(shapes)
        operators[name] = [about, keys]
    models = {name: [line.label for line in lines] for name, lines in WHOLE_MODELS.items()}
    for title, entries in {
        "Operators (--op)": operators,
        "Whole models (bench model NAME)": models,
        "Presets (--preset)": {name: [preset.about] for name, preset in PRESETS.items()},
        "Providers (--providers)": {name: _about_provider(name) for name in PROVIDERS},
    }.items():
        print(f"\n{title}")
        for name, texts in entries.items():
            print(f"  {name:<20}" + f"\n{'':<22}".join(texts))
    return OK


def _about_provider(name: str) -> list[str]:
    provider = load(name)
    try:
        about = ", ".join(f"{of} {version}" for of, version in provider.versions().items())
    except Exception as error:  # also covers a broken installation
        about = f"unavailable: {error}"
    kinds = ", ".join(f"{name}@{kind}" for kind in variants(name))
    return [text for text in (provider.ABOUT, about, kinds) if text]


def compare(args: argparse.Namespace) -> int:
    """Compare two results row by row, and show which conditions differ."""
    before, after = (results.load(path) for path in (args.before, args.after))
    column = METRICS[args.metric][0]
    keys = ("op", "shape", "device", "dtype", "pass", "mask", "weights", "option", "provider")
    old, new = (
        {
            " ".join(word for key in keys if (word := row[key]) not in ("none", "cpu")): row
            for row in summarise(result)
            if row[column] is not None
        }
        for result in (before, after)
    )
    found = {name: _change(old[name], new[name], args.metric) for name in old if name in new}
    for line in results.differences(before, after):
        print(f"Different conditions: {line}")
    if not found:
        raise ValueError(f"{args.before} and {args.after} share no row with a {args.metric}")
    print(f"{'before':>9} {'after':>9}  {'times as good':<23} {args.metric} of")
    verdicts = {name: results.verdict(low, high) for name, (_, low, high) in found.items()}
    for name, (ratio, low, high) in sorted(found.items(), key=lambda change: change[1]):
        busy = args.metric == "time" and (old[name]["busy"] or new[name]["busy"])
        interval = f"{ratio:5.2f}× [{low:.2f}, {high:.2f}]"
        print(f"{old[name][column]:>9.3g} {new[name][column]:>9.3g}  {interval:<23} ", end="")
        print(f"{name}: {verdicts[name]}{', busy' * busy}")
    count = Counter(verdicts.values())
    print(
        f"{len(found)} rows: {count['FASTER']} better, {count['SLOWER']} worse, "
        f"{count['SAME']} the same, {count['UNSURE']} unsure."
    )
    if alone := [name for name in old | new if name not in found]:
        print(f"{len(alone)} rows are in one result alone: {'; '.join(alone)}")
    limit = 0.0 if args.fail_slower is None else 1 / (1 + args.fail_slower)
    failed = [name for name, (_, _, high) in found.items() if high < limit]
    for name in failed:
        print(f"WORSE by more than {args.fail_slower:.0%}: {name}", file=sys.stderr)
    return FAULTS if failed else OK


def _change(was: Row, now: Row, metric: str) -> tuple[float, float, float]:
    """The ratio by which a row has improved, and its interval."""
    column, *ends = METRICS[metric]
    # A speed-up is better if larger, all other metrics if smaller.
    better, worse = (now, was) if metric == "speedup" else (was, now)
    if not worse[column]:
        return (1.0 if was[column] == now[column] else math.inf,) * 3
    ratio = better[column] / worse[column]
    if not ends:
        return (ratio,) * 3
    # The logarithms of the intervals of two medians add up as independent errors do.
    logs = [[math.log(row[end] / row[column]) for end in ends] for row in (better, worse)]
    (less, more), (least, most) = logs
    low, high = math.exp(-math.hypot(less, most)), math.exp(math.hypot(more, least))
    return ratio, ratio * low, ratio * high


def plot(args: argparse.Namespace) -> int:
    """Plot a result."""
    path = args.plot or args.results.with_suffix(".png")
    check_picture(path)
    write = partial(draw, results.load(args.results), theme=args.theme)
    return OK if _written(path, write) else UNWRITTEN


def record(args: argparse.Namespace) -> int:
    """Run a Python program and record the shapes of its attention calls, with their counts.

    `bench run --shapes @FILE` measures them. The exit code is the program's exit code.
    """
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
    check_picture(args.plot)
    result = parts.measure(cells_of(args), threads=threads, rounds=args.rounds, seed=args.seed)
    print(parts.table(result))
    if path := placed(args.json):
        _written(path, lambda path: results.save_json(result, summarise(result), path))
    if args.plot:
        _written(args.plot, lambda path: draw(result, path, kind="breakdown"))
    wrong = [found for found in result.cells if not found.outcomes["call"].ok]
    for found in wrong:
        print(f"WRONG: {found.cell.name}: {found.outcomes['call'].reason}", file=sys.stderr)
    return FAULTS if wrong else OK


def env(args: argparse.Namespace) -> int:
    """Print the environment that every result file records, as JSON.

    `processor` is the folder of its results, which replaces {processor} in output paths.
    """
    environment = describe_environment()
    print(json.dumps({"processor": processor_slug(environment), **environment}, indent=1))
    return OK
