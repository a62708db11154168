"""Commands, cells and results for the tests of the benchmark."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from fastattn.bench import cli, ops
from fastattn.bench.cells import Cell, make_inputs, output_names
from fastattn.bench.providers import entered, load
from fastattn.bench.results import CellResult, Outcome, Peak, Result, Round
from fastattn.bench.selection import parse_shapes
from fastattn.cli import main

# One small shape of each operator: all sizes differ where they may.
_TEXT = "B=2 H=4 Hkv=2 L=6 M=6 Lq=5 Lk=7 S=5 N=5 J=4 V=9 D=8 Dv=6 E=16 F=24 A=9 K=2 W=2"
_SIZES = dict(part.split("=") for part in _TEXT.split())
SMALL = {
    op: ",".join(
        f"{key}={_SIZES[key]}"
        for key, default in ops.get(op).SIZES.items()
        if default not in (0, "B")
    )
    for op in ops.OPS
}


def parse(*arguments: str) -> argparse.Namespace:
    """The arguments of `fastattn bench`."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def bench(*arguments: str) -> int:
    """The exit code of `fastattn bench` with these arguments."""
    try:
        return main(["bench", *arguments])
    except SystemExit as ended:  # of the parser
        return int(ended.code or 0)


def cell_of(op: str, shape: str, **options: str) -> Cell:
    """A cell of the benchmark, by operator and shape."""
    return Cell(op, parse_shapes(shape, ops.get(op).SIZES)[0], **options)


def answer(provider: str, cell: Cell, seed: int = 0) -> dict[str, Tensor]:
    """The results of a provider for a cell, by name."""
    arrays = load(provider).prepare(cell, make_inputs(cell, seed))()
    entered.close()
    return dict(zip(output_names(cell), map(torch.as_tensor, arrays), strict=True))


TINY = cell_of("sdpa", SMALL["sdpa"])


def a_result(rounds: list[Round], method: str = "measured") -> Result:
    """The result of a benchmark of one cell, with two providers."""
    cell = CellResult(TINY, 10**9, 10**6, {"torch": Outcome(), "ours": Outcome()}, rounds)
    words = {"cpu": "a processor", "isa": "avx2", "fastattn": "0", "torch": "2", "utc": "now"}
    words |= {"commit": "abc", "python": "3", "system": "Linux"}
    environment = {**words, "cpu_flags": [], "last_cache": 32 << 20}
    settings = {"baseline": "torch", "threads": 1, "time_budget": 1.0, "cache": "warm", "seed": 0}
    peaks = {"fma_f32": Peak(2e3, method)}
    return Result(environment, settings, {}, [cell], peaks)
