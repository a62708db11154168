"""The arguments of the `bench` commands; `commands` implements them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

from fastattn.bench import commands, compare, display
from fastattn.bench.cells import DEVICES
from fastattn.bench.presets import WHOLE_MODELS
from fastattn.bench.providers import DEFAULT, PROVIDERS
from fastattn.bench.selection import add_passes, add_what
from fastattn.spelling import names

EXAMPLES = """\
examples:
  fastattn bench run
  fastattn bench run --preset bert --dtype fp32,bf16 --pass fwd,fwd+bwd --out DIR
  fastattn bench run --shapes "B=1,H=8,L=128:8192:x2,D=64" --mask causal
  fastattn bench run --op mha,encoder_layer --providers torch,fastattn,fastattn@avx2
  fastattn bench record --out shapes.txt -- python train.py --epochs 1
  fastattn bench run --shapes @shapes.txt
  fastattn bench model all --dtype bf16 --pass fwd --json models.json
  fastattn bench breakdown --op memory_hops --shapes "B=32,N=50,D=20,K=3" --pass fwd,fwd+bwd
  fastattn bench compare main/results.json mine/results.json --fail-slower 5%

"""


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
        name = function.__name__.removesuffix("_all")
        command = subparsers.add_parser(
            name,
            help=words,
            description=inspect.cleandoc(function.__doc__ or ""),
            epilog=EXAMPLES + (parser.epilog or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(bench_function=function)
        if add is not None:
            add(command)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    function: Callable[[argparse.Namespace], int] = args.bench_function
    return function(args)


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
    add = parser.add_argument_group("providers").add_argument
    words = (
        f"comma-separated: {', '.join(PROVIDERS)}, a variant such as fastattn@avx2, or an "
        f"importable module (default: {','.join(DEFAULT)})"
    )
    add("--providers", metavar="LIST", type=names, default=list(DEFAULT), help=words)
    words = "the provider that the others are compared with (default: torch)"
    add("--baseline", metavar="NAME", help=words)

    how = parser.add_argument_group("how to measure")
    add = how.add_argument
    add("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    words = "cold: flush the caches before every call (default: warm)"
    add("--cache", choices=("warm", "cold"), default="warm", help=words)
    _add_threads(how)
    words = "seed of the inputs and of the order of providers (default: %(default)s)"
    add("--seed", metavar="N", type=int, default=0, help=words)
    words = "time limit for the complete run, in seconds (default: %(default).0f)"
    add("--time-budget", metavar="S", type=float, default=60.0, help=words)
    words = "comparable rounds per cell (default: %(default)s)"
    add("--rounds", metavar="N", type=int, default=15, help=words)
    words = "seconds without an answer after which a provider is stopped (default: %(default).0f)"
    add("--timeout", metavar="S", type=float, default=60.0, help=words)

    add = parser.add_argument_group(
        "output", "{processor} in a path is replaced by the folder of this machine, see `bench env`"
    ).add_argument
    words = "write results.json after every cell, and at the end .csv, .md and .png"
    add("--out", metavar="DIR", type=Path, help=words)
    for flag, words in (
        ("--json", "write raw samples and the environment"),
        ("--csv", "write one line per cell and provider"),
        ("--markdown", "write the table"),
        ("--plot", "write the plot (.png, .svg or .pdf)"),
    ):
        add(flag, metavar="FILE", type=Path, help=words)
    add("--resume", action="store_true", help="continue the run in --out")
    words = f"columns of the table, comma-separated: {', '.join(display.METRICS)}"
    add("--metric", metavar="LIST", type=names, default=[], help=words)
    add("--quiet", action="store_true", help="print no progress, only the table")


def _add_threads(parser: argparse._ActionsContainer) -> None:
    words = "number of threads (default: that of torch)"
    parser.add_argument("--threads", metavar="N", type=int, help=words)


def _add_breakdown(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    _add_threads(parser)
    add = parser.add_argument
    add("--seed", metavar="N", type=int, default=0, help="default: %(default)s")
    add("--rounds", metavar="N", type=int, default=50, help="default: %(default)s")
    add("--json", metavar="FILE", type=Path, help="write raw samples and the environment")
    add("--plot", metavar="FILE", type=Path, help="write the picture")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("before", type=Path, help="a .json file that `run` wrote")
    add("after", type=Path, help="the file to compare with it")
    add("--metric", choices=compare.METRICS, default="time", help="default: %(default)s")
    words = "exit with 1 if a row is worse by more than this over its complete interval"
    add("--fail-slower", metavar="P%", type=_share, help=words)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", type=Path, help="a .json file that `run` wrote")
    words = "which plot (default: %(default)s); all writes one file for each"
    add("--metric", choices=(*commands.PLOTS, "all"), default="speedup", help=words)
    words = "output file (default: next to the results)"
    add("--plot", metavar="FILE", type=Path, help=words)
    add("--theme", choices=("light", "dark"), default="light", help="default: %(default)s")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", type=Path, help="a .json file that `run` wrote")
    words = "output file (default: next to the results)"
    add("--out", metavar="FILE", type=Path, help=words)
    add("--title", default="Attention, measured", help="default: %(default)s")


def _add_record(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="FILE", type=Path, default="shapes.txt", help="default: %(default)s")
    metavar, words = "-- python train.py ...", "or -- python -m module ..."
    add("program", nargs=argparse.REMAINDER, metavar=metavar, help=words)


def _share(text: str) -> float:
    """Parses 5% or 0.05 as 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5% or 0.05")
    return share
