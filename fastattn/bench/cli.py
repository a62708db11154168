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

_RESULT = "a .json file that `run` wrote"
_NEXT_TO_IT = "output file (default: next to the results)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `bench` to its parser."""
    subparsers = parser.add_subparsers(dest="COMMAND", required=True)
    for function, add, words in (
        (commands.run, _add_run, "measure operators and modules"),
        (commands.model, _add_model, "measure whole models"),
        (commands.breakdown, _add_breakdown, "measure where the time of small calls goes"),
        (commands.compare, _add_compare, "compare two results; can fail on a slowdown"),
        (commands.plot, _add_plot, "plot a result"),
        (commands.report, _add_report, "write a result as one HTML file"),
        (commands.roofline, _add_threads, "measure the peaks of this machine"),
        (commands.record, _add_record, "record the shapes that a program computes"),
        (commands.env, None, "print the environment that every result records"),
        (commands.list_all, None, "list operators, presets and providers"),
    ):
        command = subparsers.add_parser(
            function.__name__.removesuffix("_all"),
            help=words,
            description=inspect.cleandoc(function.__doc__ or ""),
            epilog=parser.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(bench_function=function)
        if add is not None:
            add(command)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    function: Callable[[argparse.Namespace], int] = args.bench_function
    return function(args)


_TYPES = {"N": int, "S": float, "FILE": Path, "DIR": Path, "LIST": names}


def _add(
    to: argparse._ActionsContainer, flag: str, words: str, default: Any = None, **more: Any
) -> None:
    """Adds a flag, whose type is that of its metavar; its default ends the help."""
    name, _, metavar = flag.partition(" ")
    if default is not None and "default:" not in words:
        shown = "default: %(default)" + (".0f" if isinstance(default, float) else "s")
        words = f"{words} ({shown})" if words else shown
    if metavar:
        more = {"metavar": metavar, "type": _TYPES.get(metavar, str)} | more
    to.add_argument(name, default=default, help=words, **more)


def _add_threads(to: argparse._ActionsContainer) -> None:
    _add(to, "--threads N", "number of threads (default: that of torch)")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    _add_how(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    words = f"comma-separated: {', '.join(WHOLE_MODELS)}, or all"
    parser.add_argument("models", type=names, metavar="NAME", help=words)
    add_passes(parser)
    _add_how(parser)
    parser.set_defaults(rounds=9, time_budget=300.0, timeout=300.0)


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("providers")
    words = f"comma-separated: {', '.join(PROVIDERS)}, a variant such as fastattn@avx2, or an "
    words += f"importable module (default: {','.join(DEFAULT)})"
    _add(group, "--providers LIST", words, list(DEFAULT))
    _add(
        group, "--baseline NAME", "the provider that the others are compared with (default: torch)"
    )

    how = parser.add_argument_group("how to measure")
    _add(how, "--device", "", "cpu", choices=DEVICES)
    words = "cold: flush the caches before every call (default: warm)"
    _add(how, "--cache", words, "warm", choices=("warm", "cold"))
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
    out.add_argument("--metric", metavar="LIST", type=names, default=[], help=words)
    out.add_argument("--quiet", action="store_true", help="print no progress, only the table")


def _add_breakdown(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    _add_threads(parser)
    _add(parser, "--seed N", "", 0)
    _add(parser, "--rounds N", "", 50)
    _add(parser, "--json FILE", "write raw samples and the environment")
    _add(parser, "--plot FILE", "write the picture")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help=_RESULT)
    parser.add_argument("after", type=Path, help="the file to compare with it")
    _add(parser, "--metric", "", "time", choices=commands.METRICS)
    words = "exit with 1 if a row is worse by more than this over its complete interval"
    _add(parser, "--fail-slower P%", words, type=_share)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help=_RESULT)
    words = "which plot (default: %(default)s); all writes one file for each"
    _add(parser, "--metric", words, "speedup", choices=(*commands.PLOTS, "all"))
    _add(parser, "--plot FILE", _NEXT_TO_IT)
    _add(parser, "--theme", "", "light", choices=("light", "dark"))


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help=_RESULT)
    _add(parser, "--out FILE", _NEXT_TO_IT)
    parser.add_argument("--title", default="Attention, measured", help="default: %(default)s")


def _add_record(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--out FILE", "", "shapes.txt")
    metavar, words = "-- python train.py ...", "or -- python -m module ..."
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar=metavar, help=words)


def _share(text: str) -> float:
    """Parses 5% or 0.05 as 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5% or 0.05")
    return share
