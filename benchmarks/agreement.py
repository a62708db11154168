"""Compares `fastattn bench` with an independent measurement.

    python benchmarks/agreement.py [--only sdpa] [--repeats 2] [--threads N]

torch.utils.benchmark.Timer times the same calls, each in a new process, alternating with runs of
the benchmark, so that both see the same machine. The output has the medians and 95 % intervals of
both; they agree if the intervals overlap. The exit code is 1 if any do not. Blocks of the Timer
whose process did not receive its processors are dropped, like the disturbed rounds of the
benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from fastattn.bench import results
from fastattn.bench.worker import thread_variables, usable_cpus

# The argument of `bench run --shapes`, and the code for a user of each provider.
CELLS = {
    "sdpa B=8,H=12,L=256,D=64": (
        "q, k, v = (torch.randn(8, 12, 256, 64) for _ in range(3))",
        {
            "torch": "torch.nn.functional.scaled_dot_product_attention(q, k, v)",
            "fastattn": "fastattn.scaled_dot_product_attention(q, k, v)",
        },
    ),
    "mha B=8,L=128,E=768,H=12": (
        "x = torch.randn(8, 128, 768)\n"
        "modules = torch.nn.MultiheadAttention, fastattn.MultiheadAttention\n"
        "stock, ours = (m(768, 12, batch_first=True).eval() for m in modules)",
        {
            "torch": "stock(x, x, x, need_weights=False)",
            "fastattn": "ours(x, x, x, need_weights=False)",
        },
    ),
}
BLOCKS = 12

PROGRAM = """
import json, os, sys, time
import torch
import fastattn
from torch.utils.benchmark import Timer
threads, blocks, cpus = json.loads(sys.argv[1])
os.sched_setaffinity(0, cpus)
torch.set_num_threads(threads)
torch.empty(31 << 20, dtype=torch.uint8)  # as in the benchmark: glibc keeps freed memory
{setup}
with torch.no_grad():
    timer = Timer("{call}", globals=globals(), num_threads=threads)
    once = timer.timeit(3).median
    count = max(1, round(0.02 / once))
    samples = []
    for _ in range(blocks):
        wall, used = time.perf_counter(), time.process_time()
        ms = 1e3 * timer.timeit(count).median
        samples.append((ms, (time.process_time() - used) / (time.perf_counter() - wall)))
best = max(share for _, share in samples)
print(json.dumps([ms for ms, share in samples if share > 0.9 * best]))
"""


def independent(setup: str, call: str, threads: int) -> list[float]:
    """The milliseconds of a call in each undisturbed block."""
    program = PROGRAM.format(setup=setup, call=call)
    settings = json.dumps([threads, BLOCKS, usable_cpus(threads)])
    done = subprocess.run(
        [sys.executable, "-c", program, settings],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **thread_variables(threads)},
    )
    samples: list[float] = json.loads(done.stdout)
    return samples


def benchmarked(cells: Iterable[str], threads: int) -> dict[tuple[str, str], list[float]]:
    """The undisturbed samples of one run, for each cell and provider."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        shapes = [word for cell in cells for word in ("--shapes", cell)]
        command = [sys.executable, "-m", "fastattn", "bench", "run", "--quiet", *shapes]
        command += ["--threads", str(threads), "--rounds", str(BLOCKS), "--json", str(path)]
        command += ["--time-budget", "10"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        result = results.load(path)
    return undisturbed(result)


def undisturbed(result: results.Result) -> dict[tuple[str, str], list[float]]:
    """The samples of the rounds that count, for each cell and provider."""
    samples = {}
    for measured in result.cells:
        rounds = results.quiet_rounds(measured.rounds) or measured.rounds
        for name in measured.ready():
            key = f"{measured.cell.op} {measured.cell.shape}", name
            samples[key] = [turn.ms[name] for turn in rounds if name in turn.ms]
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    cells = {name: how for name, how in CELLS.items() if args.only in name}
    alone: dict[tuple[str, str], list[float]] = {}
    ours: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeats):
        for cell, (setup, calls) in cells.items():
            for provider, call in calls.items():
                measured = independent(setup, call, args.threads)
                alone.setdefault((cell, provider), []).extend(measured)
        for key, samples in benchmarked(cells, args.threads).items():
            ours.setdefault(key, []).extend(samples)
    print(f"{'bench, ms':>24} {'Timer, ms':>24}  ratio")
    apart = 0
    for key in alone:
        texts, intervals = [], []
        for samples in (ours[key], alone[key]):
            low, high = results.median_interval(samples)
            intervals.append((low, high))
            texts.append(f"{results.median(samples):7.3f} [{low:.3f}, {high:.3f}]")
        (low, high), (other_low, other_high) = intervals
        agree = low <= other_high and other_low <= high
        apart += not agree
        ratio = results.median(ours[key]) / results.median(alone[key])
        words = "agree" if agree else "DO NOT AGREE"
        print(f"{texts[0]:>24} {texts[1]:>24}  {ratio:.3f}  {' '.join(key)}: {words}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
