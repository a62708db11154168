"""The commands of `bench`: their arguments, a run, and from its result to files and text."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastattn.bench import ops, recording, results, runner, selection, summary
from fastattn.bench.cells import DEVICES
from fastattn.bench.machine import describe_environment, processor_slug
from fastattn.bench.providers import DEFAULT, PROVIDERS, check_name, load
from fastattn.bench.results import CellResult, Result
from fastattn.bench.summary import Row, summarise
from fastattn.bench.worker import usable_cpus
from fastattn.spelling import name_list

# The exit codes, see docs/benchmarks.md.
OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130

_OF_MODELS = """Measure whole models of PyTorch and after ``fastattn.accelerate``.

Models have real sizes and random weights: nothing is downloaded. "attention" is the share of a
model's time that its attention takes; "by it at most" is the speed-up of the model if its
attention took no time and all else were PyTorch's. A training step (--pass fwd+bwd) has no dropout
and no optimizer.
"""


def run_cells(args: argparse.Namespace) -> int:
    """Measure operators and modules. Every result is compared with fp64 before it is timed."""
    settings, metrics = _settings(args)
    folder = placed(args.out, args.device)
    saved, earlier = folder and folder / "results.json", None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    if args.resume and saved and saved.exists():
        earlier = results.load(saved)
        if differ := results.differences(earlier, settings.new_result()):
            raise ValueError(f"--resume: {saved} was measured with another {'; '.join(differ)}")

    def report(result: Result, measured: CellResult) -> None:
        if summary.was_skipped(measured):
            return
        if not args.quiet:
            text = summary.progress(result, measured, len(settings.cells))
            print(text, file=sys.stderr, flush=True)
        if saved:
            # Replaced atomically, so a killed run keeps the cells measured before. A full disk must
            # not prevent the table of a run, so it is reported at the end.
            part = saved.with_suffix(".part")
            with contextlib.suppress(OSError):
                results.save_json(result, summarise(result), part)
                part.replace(saved)

    result = runner.Runner(settings, earlier, report).run()
    rows = summarise(result)
    text = summary.page(result, rows, metrics)
    print(text)
    write_json = partial(results.save_json, result, rows)
    files: dict[Path, Callable[[Path], Any]] = {}
    if folder:
        files[folder / "results.json"] = write_json
        files[folder / "results.md"] = lambda path: path.write_text(text)
    if path := placed(args.json, args.device):
        files[path] = write_json
    written = [_written(path, write) for path, write in files.items()]
    return exit_code(result.ended, rows) if all(written) else UNWRITTEN


def _settings(args: argparse.Namespace) -> tuple[runner.Settings, Sequence[str]]:
    """The settings of a run and its metrics. Raises ValueError, which names the wrong argument."""
    for name in args.providers:
        check_name(name)
    args.providers = list(dict.fromkeys(args.providers))
    args.cells = cells = [replace(cell, device=args.device) for cell in selection.cells_of(args)]
    metrics = args.metric or summary.default_metrics(cells)
    selection.check_names("--metric", metrics, tuple(summary.METRICS))
    args.threads = _threads(args.threads)
    args.baseline = args.baseline or ("torch" if "torch" in args.providers else args.providers[0])
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here")
    for flag in ("time_budget", "rounds", "timeout"):
        if not 0 < vars(args)[flag] < math.inf:
            flag, value = flag.replace("_", "-"), vars(args)[flag]
            raise ValueError(f"--{flag} {value}: must be a positive number")
    if args.resume and not args.out:
        raise ValueError("--resume: give the --out DIR of the run to continue")
    if args.baseline not in args.providers:
        among = ",".join(args.providers)
        raise ValueError(f"--baseline {args.baseline!r} is not among --providers {among}")
    # Some of several libraries may be missing; their rows say so.
    missing = [ops.get(op).missing() for op in dict.fromkeys(cell.op for cell in cells)]
    if all(missing):
        raise ValueError(missing[0])
    return runner.Settings(**{n: vars(args)[n] for n in runner.Settings.__annotations__}), metrics


def _threads(threads: int | None) -> int:
    """The number of threads. Raises ValueError for more than processors, which would wait."""
    usable = len(usable_cpus(10**6))
    if threads is not None and not 1 <= threads <= usable:
        raise ValueError(f"--threads {threads}: from 1 to {usable}")
    return threads or torch.get_num_threads()


def placed(path: Path | None, device: str = "cpu") -> Path | None:
    """`path`, with {processor} replaced by the folder name of this machine."""
    if path is None or "{processor}" not in str(path):
        return path
    return Path(str(path).replace("{processor}", processor_slug(describe_environment(device))))


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


def breakdown(args: argparse.Namespace) -> int:
    """Measure where the time of small calls goes: checks, adapter, autograd, kernel, ...

    A time is the difference of two nested parts of the real call, on the CPU. Every result is
    compared with fp64 first.
    """
    from fastattn.bench import breakdown as parts

    threads = _threads(args.threads)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: must be at least 1")
    result = parts.measure(
        selection.cells_of(args), threads=threads, rounds=args.rounds, seed=args.seed
    )
    print(parts.table(result))
    if path := placed(args.json):
        _written(path, partial(results.save_json, result, summarise(result)))
    wrong = [measured for measured in result.cells if not measured.outcomes["call"].ok]
    for measured in wrong:
        print(f"WRONG: {measured.cell.name}: {measured.outcomes['call'].reason}", file=sys.stderr)
    return FAULTS if wrong else OK


def compare(args: argparse.Namespace) -> int:
    """Compare two results row by row, and show which conditions differ."""
    before, after = (results.load(path) for path in (args.before, args.after))
    column = _COLUMNS[args.metric]
    keys = ("op", "shape", "device", "dtype", "pass", "mask", "weights", "option", "provider")
    old, new = (
        {
            " ".join(word for key in keys if (word := row[key]) not in ("none", "cpu")): row
            for row in summarise(result)
            if row[column] is not None
        }
        for result in (before, after)
    )
    changes = {name: _change(old[name], new[name], column) for name in old if name in new}
    for line in results.differences(before, after):
        print(f"Different conditions: {line}")
    if not changes:
        raise ValueError(f"{args.before} and {args.after} share no row with a {args.metric}")
    print(f"{'before':>9} {'after':>9}  {'times as good':<23} {args.metric} of")
    verdicts = {name: results.verdict(low, high) for name, (_, low, high) in changes.items()}
    for name, (ratio, low, high) in sorted(changes.items(), key=lambda change: change[1]):
        busy = args.metric == "time" and (old[name]["busy"] or new[name]["busy"])
        interval = f"{ratio:5.2f}× [{low:.2f}, {high:.2f}]"
        print(f"{old[name][column]:>9.3g} {new[name][column]:>9.3g}  {interval:<23} ", end="")
        print(f"{name}: {verdicts[name]}{', busy' * busy}")
    count = Counter(verdicts.values())
    print(
        f"{len(changes)} rows: {count['FASTER']} better, {count['SLOWER']} worse, "
        f"{count['SAME']} the same, {count['UNSURE']} unsure."
    )
    if alone := [name for name in old | new if name not in changes]:
        print(f"{len(alone)} rows are in one result alone: {'; '.join(alone)}")
    limit = 0.0 if args.fail_slower is None else 1 / (1 + args.fail_slower)
    failed = [name for name, (_, _, high) in changes.items() if high < limit]
    for name in failed:
        print(f"WORSE by more than {args.fail_slower:.0%}: {name}", file=sys.stderr)
    return FAULTS if failed else OK


_COLUMNS = {"time": "ms", "speedup": "speedup"}  # of the metrics that are compared


def _change(was: Row, now: Row, column: str) -> tuple[float, float, float]:
    """The ratio by which a row has improved, and its interval."""
    better, worse = (now, was) if column == "speedup" else (was, now)
    ratio = better[column] / worse[column]
    # The logarithms of the intervals of two medians add up as independent errors do.
    (less, more), (least, most) = (
        [math.log(row[f"{column}_{end}"] / row[column]) for end in ("low", "high")]
        for row in (better, worse)
    )
    low, high = math.exp(-math.hypot(less, most)), math.exp(math.hypot(more, least))
    return ratio, ratio * low, ratio * high


def record(args: argparse.Namespace) -> int:
    """Run a Python program and record the shapes of its attention calls, with their counts.

    `bench run --shapes @FILE` measures them. The exit code is the program's exit code.
    """
    return recording.run_program(args.program, args.out)


def env(args: argparse.Namespace) -> int:
    """Print the environment that every result file records, as JSON.

    `processor` is the folder of its results, which replaces {processor} in output paths.
    """
    environment = describe_environment()
    print(json.dumps({"processor": processor_slug(environment), **environment}, indent=1))
    return OK


def list_all(args: argparse.Namespace) -> int:
    """List operators, whole models, presets and providers, and why a provider is unavailable."""
    operators = {}
    for name, op in ((name, ops.get(name)) for name in ops.OPS):
        sizes = ",".join(f"{key}={default}" for key, default in op.SIZES.items())
        shapes = [f"; {x} [{', '.join(dims.split())}]" for x, dims in op.leaf_shapes.items()]
        operators[name] = [f"{op.FUNCTION}: {op.ABOUT}{''.join(shapes)}", sizes]
    for title, entries in {
        "Operators (--op)": operators,
        "Whole models (bench model NAME)": {
            name: [line.label for line in lines] for name, lines in selection.WHOLE_MODELS.items()
        },
        "Presets (--preset)": {name: [preset.about] for name, preset in selection.PRESETS.items()},
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
    kinds = ", ".join(f"{name}@{kind}" for kind in provider.VARIANTS)
    return [text for text in (provider.ABOUT, about, kinds) if text]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `bench` to its parser."""
    subparsers = parser.add_subparsers(dest="COMMAND", required=True)

    def add_command(
        name: str, function: Callable[..., int], words: str, about: str = ""
    ) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=words,
            description=inspect.cleandoc(about or function.__doc__ or ""),
            epilog=parser.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(bench_function=function)
        return command

    run_parser = add_command("run", run_cells, "measure operators and modules")
    selection.add_what(run_parser)
    _add_how(run_parser)

    model = add_command("model", run_cells, "measure whole models", _OF_MODELS)
    words = f"comma-separated: {', '.join(selection.WHOLE_MODELS)}, or all"
    model.add_argument("models", type=name_list, metavar="NAME", help=words)
    selection.add_passes(model)
    _add_how(model)
    model.set_defaults(rounds=9, time_budget=300.0, timeout=300.0)

    parts = add_command("breakdown", breakdown, "measure where the time of small calls goes")
    selection.add_what(parts)
    _add(parts, "--threads N", _OF_THREADS)
    _add(parts, "--seed N", "", 0)
    _add(parts, "--rounds N", "", 50)
    _add(parts, "--json FILE", "write raw samples and the environment")

    comparison = add_command("compare", compare, "compare two results; can fail on a slowdown")
    comparison.add_argument("before", type=Path, help="a .json file that `run` wrote")
    comparison.add_argument("after", type=Path, help="the file to compare with it")
    _add(comparison, "--metric", "the metric to compare", "time", choices=_COLUMNS)
    words = "exit with 1 if the complete interval of a row is worse by more than this"
    _add(comparison, "--fail-slower P%", words, type=share)

    recorder = add_command("record", record, "record the shapes that a program computes")
    _add(recorder, "--out FILE", "", "shapes.txt")
    metavar, words = "-- python train.py ...", "or -- python -m module ..."
    recorder.add_argument("program", nargs=argparse.REMAINDER, metavar=metavar, help=words)

    add_command("env", env, "print the environment that every result records")
    add_command("list", list_all, "list operators, presets and providers")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    return args.bench_function(args)


_OF_THREADS = "number of threads (default: torch's)"
_TYPES = {"N": int, "S": float, "FILE": Path, "DIR": Path, "LIST": name_list}


def _add(
    to: argparse._ActionsContainer, flag: str, words: str, default: Any = None, **more: Any
) -> None:
    """Adds a flag; the metavar selects its type, and the default is appended to the help."""
    name, _, metavar = flag.partition(" ")
    if default is not None and "default:" not in words:
        words += " (default: %(default)" + (".0f)" if isinstance(default, float) else "s)")
    if metavar:
        more = {"metavar": metavar, "type": _TYPES.get(metavar, str)} | more
    to.add_argument(name, default=default, help=words.strip(), **more)


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("providers")
    words = f"comma-separated: {', '.join(PROVIDERS)}, a variant such as fastattn@avx2, or an "
    words += f"importable module (default: {','.join(DEFAULT)})"
    _add(group, "--providers LIST", words, list(DEFAULT))
    words = "the provider that the others are compared with (default: torch)"
    _add(group, "--baseline NAME", words)

    how = parser.add_argument_group("how to measure")
    _add(how, "--device", "the device of the tensors", "cpu", choices=DEVICES)
    _add(how, "--threads N", _OF_THREADS)
    _add(how, "--seed N", "seed of the inputs and of the order of providers", 0)
    _add(how, "--time-budget S", "time limit for the complete run, in seconds", 60.0)
    _add(how, "--rounds N", "comparable rounds per cell", 15)
    _add(how, "--timeout S", "seconds without an answer after which a provider is stopped", 60.0)

    words = "{processor} in a path is replaced by the folder of this machine, see `bench env`"
    out = parser.add_argument_group("output", words)
    _add(out, "--out DIR", "write results.json after every cell, and at the end results.md")
    _add(out, "--json FILE", "write raw samples and the environment")
    out.add_argument("--resume", action="store_true", help="continue the run in --out")
    words = f"columns of the table, comma-separated: {', '.join(summary.METRICS)}"
    _add(out, "--metric LIST", words + " (default: by operator)", [])
    out.add_argument("--quiet", action="store_true", help="print no progress, only the table")


def share(text: str) -> float:
    """argparse type, named in its errors: 5% or 0.05 is 0.05."""
    fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= fraction < 1:
        raise ValueError
    return fraction
