"""The commands of `bench`, except those that measure."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from fastattn.bench import compare as comparing
from fastattn.bench import measuring, ops, results
from fastattn.bench.display import milliseconds
from fastattn.bench.measuring import FAULTS, OK
from fastattn.bench.presets import PRESETS, WHOLE_MODELS
from fastattn.bench.providers import PROVIDERS, load, variants
from fastattn.bench.rounds import QUIET_SHARE
from fastattn.bench.selection import cells_of
from fastattn.bench.shapes import parse_line
from fastattn.bench.summary import summarise

PLOTS = ("speedup", "time", "roofline")


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
    form = milliseconds if args.metric == "time" else "{:.3g}".format
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
        measuring.check_picture(args.plot)
    result = results.load(args.results)
    kinds = PLOTS if args.metric == "all" else (args.metric,)
    for kind in kinds:
        name = args.results.with_suffix(".png") if args.plot is None else args.plot
        if args.metric == "all" or (args.plot is None and kind != "speedup"):
            name = name.with_name(f"{name.stem}-{kind}{name.suffix}")
        if not measuring.draw(result, name, kind, args.theme):
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
    from fastattn.bench import roofline as roof

    if args.results is None:
        if args.plot:
            raise ValueError("--plot needs a result: the peaks alone have no plot")
        threads = measuring.check_threads(args.threads)
        torch.set_num_threads(threads)
        print(f"{threads} thread{'s' if threads > 1 else ''}")
        peaks, share = roof.measure(threads)
        print("\n".join(roof.roof_lines(peaks)))
        if share < QUIET_SHARE:
            print(f"Other processes took up to {1 - share:.0%} of the cores: measure again.")
        return OK
    if args.plot:
        measuring.check_picture(args.plot)
    result = results.load(args.results)
    print("\n".join([*roof.roof_lines(result.peaks), "", *roof.cell_lines(summarise(result))]))
    if args.plot and measuring.draw(result, args.plot, "roofline"):
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

    threads = measuring.check_threads(args.threads)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: must be at least 1")
    if args.plot:
        measuring.check_picture(args.plot)
    path = measuring.placed(args.json)
    result = parts.measure(cells_of(args), threads=threads, rounds=args.rounds, seed=args.seed)
    print("\n".join(parts.lines(result)))
    if path:
        results.save_json(result, summarise(result), path)
        print(f"Written: {path}")
    if args.plot and measuring.draw(result, args.plot, "breakdown"):
        print(f"Written: {args.plot}")
    wrong = [found for found in result.cells if found.outcomes["call"].status != "ok"]
    for found in wrong:
        print(f"WRONG: {found.cell.name}: {found.outcomes['call'].reason}", file=sys.stderr)
    return FAULTS if wrong else OK


def env(args: argparse.Namespace) -> int:
    """Print the environment that every result file records, as JSON.

    `processor` is the folder of its results, which replaces {processor} in output paths.
    """
    from fastattn.bench.environment import describe_environment, processor_slug

    environment = describe_environment()
    facts = {"processor": processor_slug(environment), **environment}
    print(json.dumps(facts, indent=1))
    return OK
