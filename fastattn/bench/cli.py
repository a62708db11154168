"""The arguments of the `bench` commands; `commands` implements them."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastattn.bench import commands, compare, display
from fastattn.bench.cells import DEVICES
from fastattn.bench.commands import FAULTS, INTERRUPTED, OK, UNWRITTEN, USAGE
from fastattn.bench.presets import WHOLE_MODELS
from fastattn.bench.providers import DEFAULT, PROVIDERS
from fastattn.bench.selection import add_passes, add_what
from fastattn.spelling import names

__all__ = ["FAULTS", "INTERRUPTED", "OK", "UNWRITTEN", "USAGE", "add_arguments", "run"]

EXAMPLES = {
    "run": """\
examples:
  fastattn bench run
  fastattn bench run --preset bert --dtype fp32,bf16 --pass fwd,fwd+bwd --out DIR
  fastattn bench run --shapes "B=1,H=8,L=128:8192:x2,D=64" --mask causal
  fastattn bench run --op mha,encoder_layer --providers torch,fastattn,fastattn@avx2
  fastattn bench run --shapes @shapes.txt    (a file that `bench record` wrote)

""",
    "model": """\
examples:
  fastattn bench model bert-base
  fastattn bench model all --dtype bf16 --pass fwd --json models.json

""",
    "breakdown": """\
example:
  fastattn bench breakdown --op memory_hops --shapes "B=32,N=50,D=20,K=3" --pass fwd,fwd+bwd

""",
    "compare": """\
example:
  fastattn bench compare main/results.json mine/results.json --fail-slower 5%

""",
    "record": """\
example:
  fastattn bench record --out shapes.txt -- python train.py --epochs 1

""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `bench` to its parser."""
    subparsers = parser.add_subparsers(dest="bench_command", metavar="COMMAND")
    parser.set_defaults(bench_function=lambda args: _no_command(parser))
    for function, add, words in (
        (commands.run, _add_run, "measure operators and modules"),
        (commands.model, _add_model, "measure whole models"),
        (commands.breakdown, _add_breakdown, "measure where the time of small calls goes"),
        (commands.compare, _add_compare, "compare two results; can fail on a slowdown"),
        (commands.plot, _add_plot, "plot a result"),
        (commands.report, _add_report, "write a result as one HTML file"),
        (
            commands.roofline,
            _add_roofline,
            "measure the peaks of this machine, or compare a result with them",
        ),
        (commands.record, _add_record, "record the shapes that a program computes"),
        (commands.env, None, "print the environment that every result records"),
        (commands.list_all, None, "list operators, presets and providers"),
    ):
        name = function.__name__.removesuffix("_all")
        command = subparsers.add_parser(
            name,
            help=words,
            description=inspect.cleandoc(function.__doc__ or ""),
            epilog=EXAMPLES.get(name, "") + (parser.epilog or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(bench_function=function)
        if add is not None:
            add(command)


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    print(f"\n{parser.prog}: error: the following arguments are required: COMMAND", file=sys.stderr)
    return USAGE


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; usage errors go to stderr and return 2."""
    function: Callable[[argparse.Namespace], int] = args.bench_function
    try:
        return function(args)
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        message = f"{error.filename}: {error.strerror}" if named else str(error)
        print(f"fastattn bench: {message}", file=sys.stderr)
        return USAGE
    except ValueError as error:
        print(f"fastattn bench: {error}", file=sys.stderr)
        return USAGE


def _add_model(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "models",
        type=names,
        metavar="NAME",
        help=f"comma-separated: {', '.join(WHOLE_MODELS)}, or all",
    )
    add_passes(what)
    _add_how(parser)
    parser.set_defaults(
        mask=None, weights=None, option=None, rounds=9, time_budget=300.0, timeout=300.0
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    _add_how(parser)


def _option(
    parser: argparse._ActionsContainer, flag: str, metavar: str, words: str, **more: Any
) -> None:
    parser.add_argument(flag, metavar=metavar, help=words, **more)


_FILE: dict[str, Any] = {"metavar": "FILE", "type": Path}


def _add_how(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("providers")
    named = f"{', '.join(PROVIDERS)}, a variant such as fastattn@avx2, or an importable module"
    words = f"comma-separated: {named} (default: {','.join(DEFAULT)})"
    _option(who, "--providers", "LIST", words, type=names, default=list(DEFAULT))
    words = "the provider that the others are compared with (default: torch)"
    _option(who, "--baseline", "NAME", words)
    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", choices=DEVICES, default="cpu", help="default: cpu")
    words = "cold: flush the caches before every call (default: warm)"
    how.add_argument("--cache", choices=("warm", "cold"), default="warm", help=words)
    _add_threads(how)
    words = "seed of the inputs and of the order of providers (default: 0)"
    _option(how, "--seed", "N", words, type=int, default=0)
    words = "time limit for the complete run, in seconds (default: %(default).0f)"
    _option(how, "--time-budget", "S", words, type=float, default=60.0)
    words = "comparable rounds per cell (default: %(default)s)"
    _option(how, "--rounds", "N", words, type=int, default=15)
    words = "seconds without an answer after which a provider is stopped (default: %(default).0f)"
    _option(how, "--timeout", "S", words, type=float, default=60.0)
    out = parser.add_argument_group(
        "output", "{processor} in a path is replaced by the folder of this machine, see `bench env`"
    )
    words = "write results.json, .jsonl, .csv, .md and .png"
    _option(out, "--out", "DIR", words, type=Path)
    out.add_argument("--json", **_FILE, help="write raw samples and the environment")
    out.add_argument("--csv", **_FILE, help="write one line per cell and provider")
    out.add_argument("--markdown", **_FILE, help="write the table")
    out.add_argument("--plot", **_FILE, help="write the plot (.png, .svg or .pdf)")
    out.add_argument("--resume", action="store_true", help="continue the run in --out")
    words = f"columns of the table, comma-separated: {', '.join(display.METRICS)}"
    _option(out, "--metric", "LIST", words, type=names, default=[])
    out.add_argument("--quiet", action="store_true", help="print no progress, only the table")


def _add_threads(parser: argparse._ActionsContainer) -> None:
    _option(parser, "--threads", "N", "number of threads (default: that of torch)", type=int)


def _add_breakdown(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    _add_threads(parser)
    _option(parser, "--seed", "N", "seed (default: 0)", type=int, default=0)
    _option(parser, "--rounds", "N", "rounds (default: %(default)s)", type=int, default=50)
    parser.add_argument("--json", **_FILE, help="write raw samples and the environment")
    parser.add_argument("--plot", **_FILE, help="write the picture")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="a .json or .jsonl file that `run` wrote")
    parser.add_argument("after", type=Path, help="the file to compare with it")
    words = "the metric to compare (default: time)"
    parser.add_argument("--metric", choices=compare.METRICS, default="time", help=words)
    words = "exit with 1 if a row is worse by more than this over its complete interval"
    _option(parser, "--fail-slower", "P%", words, type=_share)
    _option(parser, "--providers", "LIST", "compare only these providers", type=names)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="a .json or .jsonl file that `run` wrote")
    words = "which plot (default: speedup); all writes one file for each"
    kinds = (*commands.PLOTS, "all")
    parser.add_argument("--metric", choices=kinds, default="speedup", help=words)
    parser.add_argument("--plot", **_FILE, help="output file (default: next to the results)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="a .json or .jsonl file that `run` wrote")
    parser.add_argument("--out", **_FILE, help="output file (default: next to the results)")
    parser.add_argument("--title", default="Attention, measured", help="default: %(default)s")


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    words = "a result; without it, measure the peaks now"
    parser.add_argument("results", type=Path, nargs="?", help=words)
    _add_threads(parser)
    parser.add_argument("--plot", **_FILE, help="write the roofline plot of the result")


def _add_record(parser: argparse.ArgumentParser) -> None:
    default = Path("shapes.txt")
    parser.add_argument("--out", **_FILE, default=default, help="default: %(default)s")
    words = "or -- python -m module ..."
    rest, metavar = argparse.REMAINDER, "-- python train.py ..."
    parser.add_argument("program", nargs=rest, metavar=metavar, help=words)


def _share(text: str) -> float:
    """Parses 5% or 0.05 as 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5% or 0.05")
    return share
