"""Commands, cells and results for the tests of the benchmark."""

from __future__ import annotations

import argparse

from fastattn.bench import cli, ops
from fastattn.bench.cells import Cell
from fastattn.bench.results import CellResult, Outcome, Peak, Result, Round
from fastattn.bench.shapes import parse_shapes


def parse(*arguments: str) -> argparse.Namespace:
    """The arguments of `fastattn bench`."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def bench(*arguments: str) -> int:
    """The exit code of `fastattn bench` with these arguments."""
    return cli.run(parse(*arguments))


def cell_of(op: str, shape: str, **options: str) -> Cell:
    return Cell(op, parse_shapes(shape, ops.get(op).SIZES)[0], **options)


TINY = cell_of("sdpa", "B=2,H=4,Hkv=2,Lq=5,Lk=7,D=8,Dv=6")


def a_result(rounds: list[Round], method: str = "measured") -> Result:
    cell = CellResult(TINY, 10**9, 10**6, {"torch": Outcome(), "ours": Outcome()}, rounds)
    environment = {
        "cpu": "a processor",
        "cpu_flags": [],
        "isa": "avx2",
        "fastattn": "0",
        "torch": "2",
    }
    settings = {"baseline": "torch", "threads": 1, "time_budget": 1.0}
    peaks = {"fma_f32": Peak(2e3, method)}
    return Result(environment, settings, {}, [cell], peaks)
