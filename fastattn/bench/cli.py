"""The arguments of the `bench` commands; `commands` implements them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastattn.bench import commands, summary
from fastattn.bench.cells import DEVICES
from fastattn.bench.providers import DEFAULT, PROVIDERS
from fastattn.bench.selection import WHOLE_MODELS, add_passes, add_what
from fastattn.spelling import names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `bench` to its parser."""
    subparsers = parser.add_subparsers(dest="COMMAND", required=True)

    def add_command(function: Callable[..., int], words: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            function.__name__.removesuffix("_all"),
            help=words,
            description=inspect.cleandoc(function.__doc__ or ""),
            epilog=parser.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(bench_function=function)
        return command

    run = add_command(commands.run, "measure operators and modules")
    add_what(run)
    _add_how(run)

    model = add_command(commands.model, "measure whole models")
    words = f"comma-separated: {', '.join(WHOLE_MODELS)}, or all"
    model.add_argument("models", type=names, metavar="NAME", help=words)
    add_passes(model)
    _add_how(model)
    model.set_defaults(rounds=9, time_budget=300.0, timeout=300.0)

    breakdown = add_command(commands.breakdown, "measure where the time of small calls goes")
    add_what(breakdown)
    _add_threads(breakdown)
    _add(breakdown, "--seed N", "", 0)
    _add(breakdown, "--rounds N", "", 50)
    _add(breakdown, "--json FILE", "write raw samples and the environment")
    _add(breakdown, "--plot FILE", "write the picture")

    a_result = "a .json file that `run` wrote"
    compare = add_command(commands.compare, "compare two results; can fail on a slowdown")
    compare.add_argument("before", type=Path, help=a_result)
    compare.add_argument("after", type=Path, help="the file to compare with it")
    _add(compare, "--metric", "the metric to compare", "time", choices=commands.METRICS)
    words = "exit with 1 if the complete interval of a row is worse by more than this"
    _add(compare, "--fail-slower P%", words, type=_share)

    plot = add_command(commands.plot, "plot a result")
    plot.add_argument("results", type=Path, help=a_result)
    _add(plot, "--plot FILE", "output file (default: next to the results)")
    _add(plot, "--theme", "", "light", choices=("light", "dark"))

    record = add_command(commands.record, "record the shapes that a program computes")
    _add(record, "--out FILE", "", "shapes.txt")
    metavar, words = "-- python train.py ...", "or -- python -m module ..."
    record.add_argument("program", nargs=argparse.REMAINDER, metavar=metavar, help=words)

    add_command(commands.env, "print the environment that every result records")
    add_command(commands.list_all, "list operators, presets and providers")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    function: Callable[[argparse.Namespace], int] = args.bench_function
    return function(args)


_TYPES = {"N": int, "S": float, "FILE": Path, "DIR": Path, "LIST": names}


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


def _add_threads(to: argparse._ActionsContainer) -> None:
    _add(to, "--threads N", "number of threads (default: torch's)")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("providers")
    words = f"comma-separated: {', '.join(PROVIDERS)}, a variant such as fastattn@avx2, or an "
    words += f"importable module (default: {','.join(DEFAULT)})"
    _add(group, "--providers LIST", words, list(DEFAULT))
    words = "the provider that the others are compared with (default: torch)"
    _add(group, "--baseline NAME", words)

    how = parser.add_argument_group("how to measure")
    _add(how, "--device", "the device of the tensors", "cpu", choices=DEVICES)
    _add_threads(how)
    _add(how, "--seed N", "seed of the inputs and of the order of providers", 0)
    _add(how, "--time-budget S", "time limit for the complete run, in seconds", 60.0)
    _add(how, "--rounds N", "comparable rounds per cell", 15)
    _add(how, "--timeout S", "seconds without an answer after which a provider is stopped", 60.0)

    words = "{processor} in a path is replaced by the folder of this machine, see `bench env`"
    out = parser.add_argument_group("output", words)
    _add(out, "--out DIR", "write results.json after every cell, and at the end .csv, .md and .png")
    _add(out, "--json FILE", "write raw samples and the environment")
    out.add_argument("--resume", action="store_true", help="continue the run in --out")
    words = f"columns of the table, comma-separated: {', '.join(summary.METRICS)}"
    _add(out, "--metric LIST", words + " (default: by operator)", [])
    out.add_argument("--quiet", action="store_true", help="print no progress, only the table")


def _share(text: str) -> float:
    """Parses 5% or 0.05 as 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5% or 0.05")
    return share
