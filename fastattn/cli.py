"""The command line: `fastattn COMMAND` or `python -m fastattn COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from fastattn._version import __version__

# Command: the module with its add_arguments(parser) and run(args) -> int, and its description.
COMMANDS = {
    "info": ("fastattn.info", "show versions, processor, threads and built backends"),
    "doctor": ("fastattn.doctor", "find what makes attention slow or wrong here, and the fix"),
    "verify": ("fastattn.verify", "check the results of this build on this machine"),
    "bench": ("fastattn.bench.cli", "compare the speed with PyTorch and other libraries"),
    "explain": ("fastattn._explain", "show which backend runs a call, and why not the others"),
    "tune": ("fastattn.tune", "measure the fastest choices on this machine, and use them"),
    "kernel": ("fastattn._kernel", "write a kernel that transformers loads as flash attention"),
}

EXIT_CODES = """\
exit codes:
  0  done; 130: interrupted
  1  wrong results, a benchmark that is wrong or slower, or a problem found
  2  wrong usage: the message names the argument and the allowed values
  3  a benchmark was measured, but a file could not be written
"""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of `command` only.

    The modules of the other commands are not imported.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fastattn",
        description="Fused attention kernels for PyTorch.",
        epilog=EXIT_CODES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error, for a bug report"
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=summary, description=summary, epilog=EXIT_CODES, formatter_class=raw
        )
        if name == command:
            importlib.import_module(module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; ``argv`` is None for the arguments of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(command)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2, "\nfastattn: error: the following arguments are required: COMMAND\n")
    args = parser.parse_args(arguments)
    try:
        status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has exited; exit silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if args.traceback or str(error.name).startswith("fastattn"):
            raise
        reason = f"it needs {error.name}, which is not installed"
        print(f"fastattn {args.command}: error: {reason}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, RuntimeError, NotImplementedError, OSError) as error:
        if args.traceback:
            raise
        print(f"fastattn {args.command}: error: {error}", file=sys.stderr)
        return 2
    return status
