"""The command line: `python -m fastattn bench run | list | plot | env`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastattn.bench import ops
from fastattn.bench.cells import DEVICES, DTYPES, MASKS, PASSES, WEIGHTS, Cell
from fastattn.bench.presets import PRESETS, Template, preset_cells, template_cells
from fastattn.bench.providers import DEFAULT, PROVIDERS, check_name, load, variants
from fastattn.bench.shapes import Line, parse_line, read_lines

# Exit codes, as documented in docs/benchmarks.md.
OK, FAULTS, USAGE, UNWRITTEN, INTERRUPTED = 0, 1, 2, 3, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `bench` to its parser."""
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND", required=True)
    _add_run(commands.add_parser("run", help="measure", description=_run.__doc__))
    _add_list(commands.add_parser("list", help="what can be measured", description=_list.__doc__))
    _add_plot(commands.add_parser("plot", help="draw a result again", description=_plot.__doc__))
    env = commands.add_parser("env", help="the environment of a result", description=_env.__doc__)
    env.set_defaults(bench_function=_env)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; usage errors go to stderr and return 2."""
    function: Callable[[argparse.Namespace], int] = args.bench_function
    try:
        return function(args)
    except (ValueError, OSError) as error:
        print(f"fastattn bench: {error}", file=sys.stderr)
        return USAGE


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_what(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which cells are meant."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--preset",
        metavar="LIST",
        help=f"shapes of real models: {', '.join(PRESETS)}, all (default: quick)",
    )
    what.add_argument(
        "--op",
        type=_names,
        default=[],
        metavar="LIST",
        help=f"only these operators (with --shapes: sdpa): {', '.join(ops.OPS)}",
    )
    what.add_argument(
        "--shapes",
        action="append",
        metavar="S",
        help='e.g. "B=1,H=8,Lq=128:8192:x2,Lk=Lq,D=64", "mha B=8,L=512,E=768,H=12 mask=padding", '
        "or @FILE with such lines; repeatable",
    )
    what.add_argument("--dtype", type=_names, default=[], metavar="LIST", help="fp32,bf16,fp16")
    what.add_argument(
        "--pass", dest="passes", type=_names, default=[], metavar="LIST", help="fwd,bwd,fwd+bwd"
    )
    what.add_argument("--mask", choices=MASKS, help="the mask of every cell")
    what.add_argument("--weights", choices=WEIGHTS, help="the attention weights that are returned")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(bench_function=_run)
    add_what(parser)
    who = parser.add_argument_group("who is measured")
    who.add_argument(
        "--providers",
        type=_names,
        default=list(DEFAULT),
        metavar="LIST",
        help=f"{', '.join(PROVIDERS)}, variants as fastattn@avx2, or a module of yours "
        f"(default: {','.join(DEFAULT)})",
    )
    who.add_argument("--baseline", metavar="NAME", help="what the others are compared with (torch)")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--device", choices=DEVICES, default="cpu", help="(cpu)")
    how.add_argument(
        "--cache",
        choices=("warm", "cold"),
        default="warm",
        help="cold: the caches are emptied before every call (warm)",
    )
    how.add_argument("--threads", type=int, metavar="N", help="default: as many as torch uses")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of inputs and order (0)")
    how.add_argument(
        "--time-budget", type=float, default=60.0, metavar="S", help="seconds for everything (60)"
    )
    how.add_argument("--rounds", type=int, default=15, metavar="N", help="quiet rounds a cell (15)")
    how.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="a provider silent so long hangs"
    )
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--out", type=Path, metavar="DIR", help="results.json, .jsonl, .csv, .md and .png"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="raw samples and environment")
    out.add_argument("--csv", type=Path, metavar="FILE", help="one line for each cell and provider")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="the table")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png or .svg)")
    out.add_argument("--resume", action="store_true", help="go on with the run that is in --out")
    out.add_argument("--quiet", action="store_true", help="no progress, only the table")


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(bench_function=_list)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(bench_function=_plot)
    parser.add_argument("results", type=Path, help="a .json or .jsonl that `run` wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="default: next to the results")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")


def cells_of(args: argparse.Namespace, dtypes: Sequence[str] = DTYPES) -> list[Cell]:
    """The cells that the arguments ask for. Raises ValueError naming the argument that is wrong."""
    _check_names("--dtype", args.dtype, dtypes)
    _check_names("--pass", args.passes, PASSES)
    wanted = [ops.resolve(name) for name in args.op]
    if args.shapes and args.preset:
        raise ValueError("give either --shapes or --preset")
    if args.shapes:
        lines = [line for text in args.shapes for line in _lines(text)]
        cells = [cell for line in lines for cell in _line_cells(line, args, wanted)]
    else:
        preset = args.preset or ("all" if wanted else "quick")
        cells = preset_cells(preset, args.dtype, args.passes)
        cells = [cell for cell in cells if not wanted or cell.op in wanted]
        if not cells:
            raise ValueError(f"--preset {preset} has no cell of --op {','.join(args.op)}")
    if args.mask:
        cells = [dataclasses.replace(cell, mask=args.mask) for cell in cells]
    if args.weights:
        cells = [dataclasses.replace(cell, weights=args.weights) for cell in cells]
    return cells


def _check_names(flag: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{flag} {name!r}: allowed are {', '.join(allowed)}")


def _lines(text: str) -> list[Line]:
    return read_lines(Path(text[1:])) if text.startswith("@") else [parse_line(text)]


def _line_cells(line: Line, args: argparse.Namespace, wanted: list[str]) -> list[Cell]:
    """The cells of one line; an operator that --op does not want has none."""
    given = {flag: _names(line.options.get(flag, "")) for flag in ("dtype", "pass")}
    _check_names("dtype=", given["dtype"], DTYPES)
    _check_names("pass=", given["pass"], PASSES)
    named = [ops.resolve(line.op)] if line.op else wanted or ["sdpa"]
    return [
        cell
        for op in named
        if op in (wanted or named)
        for cell in template_cells(
            Template(
                line.label,
                op,
                line.shape,
                line.options.get("mask", "none"),
                line.options.get("weights", "none"),
            ),
            args.dtype or given["dtype"] or ["fp32"],
            args.passes or given["pass"] or ["fwd"],
        )
    ]


def _settings_error(args: argparse.Namespace) -> str | None:
    for flag, value in (
        ("--threads", args.threads),
        ("--time-budget", args.time_budget),
        ("--rounds", args.rounds),
        ("--timeout", args.timeout),
    ):
        if value is not None and value <= 0:
            return f"{flag} {value}: must be positive"
    if args.resume and not args.out:
        return "--resume: give the --out DIR of the run to go on with"
    if not args.providers:
        return "--providers: none given"
    if args.baseline is not None and args.baseline not in args.providers:
        return f"--baseline {args.baseline!r} is not among --providers {','.join(args.providers)}"
    return None


def _run(args: argparse.Namespace) -> int:
    """Measure. Every answer is compared with fp64 before it is timed."""
    from fastattn.bench import display, results, runner, summary

    for name in args.providers:
        check_name(name)
    cells = [dataclasses.replace(cell, device=args.device) for cell in cells_of(args)]
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here")
    if problem := _settings_error(args):
        raise ValueError(problem)
    out: Path | None = args.out
    files = {
        "json": args.json or (out / "results.json" if out else None),
        "csv": args.csv or (out / "results.csv" if out else None),
        "markdown": args.markdown or (out / "results.md" if out else None),
        "plot": args.plot or (out / "results.png" if out else None),
    }
    baseline = args.baseline or ("torch" if "torch" in args.providers else args.providers[0])
    settings = runner.Settings(
        cells=cells,
        providers=list(dict.fromkeys(args.providers)),
        baseline=baseline,
        cache=args.cache,
        seed=args.seed,
        time_budget=args.time_budget,
        rounds=args.rounds,
        timeout=args.timeout,
        **({"threads": args.threads} if args.threads else {}),
    )
    line_by_line = out / "results.jsonl" if out else None

    def earlier(now: results.Result) -> results.Result | None:
        return results.resumable(line_by_line, now) if line_by_line and args.resume else None

    with display.make_watcher(args.quiet) as watcher:
        run = runner.Runner(settings, watcher, earlier)
        journal = results.Journal(line_by_line)
        try:
            result = run.run(journal)
        finally:
            journal.close()
    rows = summary.summarise(result)
    display.print_result(result, rows)
    written, failures = [], [journal.failure] if journal.failure else []
    for path, write in (
        (files["json"], lambda path: results.save_json(result, rows, path)),
        (files["csv"], lambda path: results.save_csv(rows, path)),
        (files["markdown"], lambda path: display.save_markdown(result, rows, path)),
        (files["plot"], lambda path: _draw(result, path, "light")),
    ):
        if path:
            failure = _try(write, path)
            written += [] if failure else [path]
            failures += [failure] if isinstance(failure, OSError) else []
    if written:
        print(f"Written: {', '.join(str(path) for path in written)}")
    for failure in failures:
        print(f"Not written: {failure.filename}: {failure.strerror}", file=sys.stderr)
    return UNWRITTEN if failures else _exit_code(result.ended, rows)


def _try(write: Callable[[Path], bool | None], path: Path) -> OSError | bool:
    """Whether `path` could not be written, and if the system said why, what it said."""
    try:
        return write(path) is False
    except OSError as error:
        error.filename = error.filename or str(path)
        return error


def _exit_code(ended: str, rows: Sequence[dict[str, object]]) -> int:
    if ended == "interrupted":
        return INTERRUPTED
    faults = {"WRONG", "ERROR", "CRASHED", "HUNG"}
    return FAULTS if any(row["status"] in faults or row["impossible"] for row in rows) else OK


def _draw(result: object, path: Path, theme: str) -> bool:
    try:
        from fastattn.bench import plots
    except ImportError:
        print(
            f"No picture {path}: matplotlib is missing (pip install 'fastattn[bench]')",
            file=sys.stderr,
        )
        return False
    plots.draw(result, path, theme)  # type: ignore[arg-type]
    return True


def _list(args: argparse.Namespace) -> int:
    """Lists operators, presets with their models, and providers with why one is unavailable."""
    print("Operators (--op)")
    for name in ops.OPS:
        op = ops.get(name)
        keys = ",".join(f"{key}={default}" for key, default in op.SIZES.items())
        print(f"  {name:<20}{op.FUNCTION}: {op.ABOUT}\n{'':<22}{keys}; torch: {op.TORCH}")
    print("\nPresets (--preset)")
    for name, preset in PRESETS.items():
        print(f"  {name:<20}{preset.about}")
    print("\nProviders (--providers)")
    for name in PROVIDERS:
        provider = load(name)
        try:
            versions = provider.versions()
            about = ", ".join(f"{package} {version}" for package, version in versions.items())
        except Exception as error:  # a broken install is a reason like any other
            about = f"unavailable: {error}"
        print(f"  {name:<20}{provider.ABOUT}\n{'':<22}{about}")
        if known := variants(name):
            print(f"{'':<22}{', '.join(f'{name}@{variant}' for variant in known)}")
    return OK


def _plot(args: argparse.Namespace) -> int:
    """Draws a result file again."""
    from fastattn.bench import results

    path = args.plot or args.results.with_suffix(".png")
    if not _draw(results.load(args.results), path, args.theme):
        return FAULTS
    print(f"Written: {path}")
    return OK


def _env(args: argparse.Namespace) -> int:
    """Prints the environment that goes into every result file, as JSON."""
    from fastattn.bench.environment import describe_environment

    print(json.dumps(describe_environment(), indent=1))
    return OK
