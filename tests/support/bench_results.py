"""Commands, cells and results for the tests of the benchmark."""

from __future__ import annotations

import argparse

from fastattn.bench import cli, ops
from fastattn.bench.cells import Cell
from fastattn.bench.results import CellResult, Outcome, Peak, Result, Round
from fastattn.bench.shapes import parse_shapes
from fastattn.cli import main

# One small shape of each operator.
SMALL = {
    "sdpa": "B=2,H=4,Hkv=2,Lq=5,Lk=7,D=8,Dv=6",
    "linear": "M=6,K=16,N=12",
    "mha": "B=2,L=6,E=16,H=2",
    "encoder_layer": "B=2,L=6,E=16,H=2,F=24",
    "encoder": "B=2,L=6,E=16,H=2,F=24",
    "decoder": "B=2,L=6,S=5,E=16,H=2,F=24",
    "varlen": "B=3,H=4,Hkv=2,L=12,D=8",
    "decode": "B=2,H=4,Hkv=2,Lq=2,Lk=9,D=8",
    "merge_states": "B=2,H=4,L=5,D=8",
    "additive": "B=2,Lq=5,Lk=7,A=9,Dv=6",
    "bahdanau": "B=2,Lq=5,Lk=7,E=9,A=6",
    "luong": "B=2,Lq=5,Lk=7,D=9,Dv=6,W=2",
    "attention_stats": "B=2,H=4,Hkv=2,Lq=5,Lk=7,D=8",
    "hopfield": "B=2,H=2,L=3,N=5,D=8,K=2",
    "hopfield_energy": "B=2,H=2,L=3,N=5,D=8",
    "memory_hops": "B=3,N=7,D=5,K=2",
    "encode_memory": "B=2,N=5,J=4,V=9,D=6",
    "memn2n": "B=2,N=5,J=4,V=9,D=6,K=2",
    "sinusoidal": "B=2,L=6,E=9",
    "learned": "B=2,L=5,E=6",
    "decoder_layer": "B=2,L=6,S=5,E=16,H=2,F=24",
    "transformer": "B=2,L=6,S=5,E=16,H=2,F=24",
    "hard": "B=2,H=4,Lq=5,Lk=7,D=8,Dv=6",
    "head_network": "B=2,H=3,L=5,D=4,F=6",
    "additive_module": "B=2,Lq=5,Lk=7,A=9",
    "luong_module": "B=2,Lq=5,Lk=7,D=9",
    "global_attention": "B=2,Lq=5,Lk=7,D=9",
    "hopfield_module": "B=2,L=3,N=5,E=16,H=2,K=2",
    "hopfield_layer": "B=2,L=3,N=5,E=16,H=2,K=2",
    "hopfield_pooling": "B=2,L=3,N=5,E=16,H=2,K=2",
    "key_value_memory": "B=2,L=3,N=5,D=8,Dv=6",
    "sinusoidal_table": "L=6,E=9",
    "positional": "B=2,L=6,E=9",
}


def parse(*arguments: str) -> argparse.Namespace:
    """The arguments of `fastattn bench`."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def bench(*arguments: str) -> int:
    """The exit code of `fastattn bench` with these arguments."""
    return main(["bench", *arguments])


def cell_of(op: str, shape: str, **options: str) -> Cell:
    return Cell(op, parse_shapes(shape, ops.get(op).SIZES)[0], **options)


TINY = cell_of("sdpa", SMALL["sdpa"])


def a_result(rounds: list[Round], method: str = "measured") -> Result:
    cell = CellResult(TINY, 10**9, 10**6, {"torch": Outcome(), "ours": Outcome()}, rounds)
    words = {"cpu": "a processor", "isa": "avx2", "fastattn": "0", "torch": "2", "utc": "now"}
    words |= {"commit": "abc", "python": "3", "system": "Linux"}
    environment = {**words, "cpu_flags": [], "last_cache": 32 << 20}
    settings = {"baseline": "torch", "threads": 1, "time_budget": 1.0, "cache": "warm", "seed": 0}
    peaks = {"fma_f32": Peak(2e3, method)}
    return Result(environment, settings, {}, [cell], peaks)
