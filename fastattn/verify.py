"""`fastattn verify`: check the results of this build on this machine.

Runs the case table of ``fastattn.testing`` on every native backend, forward and backward, and
compares with the reference by the error bound of ``docs/numerics.md``. A case that raises, as for
lack of memory, fails the command.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fastattn import dispatch, evidence, spelling
from fastattn._table import as_text
from fastattn.testing import PROOFS, OnGpu, Target, Verdict, targets
from fastattn.testing.cases import FLOATS, NamedCase

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    spelling.add_list(parser, "--op", f"only these operators: {', '.join(PROOFS)}")
    text = "cpu, cuda, triton or reference (default: every native backend that runs here)"
    add("--backend", help=text)
    text = "an instruction set, `all`, or `current` (default: current)"
    add("--isa", default="current", help=text)
    spelling.add_list(parser, "--dtype", f"only these dtypes: {', '.join(_DTYPES)}")
    add("--case", metavar="TEXT", help="only cases whose name is TEXT, or contains it")
    text = "check every case with N draws of random values (default: 1)"
    add("--draws", type=int, default=1, metavar="N", help=text)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="check only every tenth case")
    extent.add_argument("--complete", action="store_true", help="check the slow cases too")


@dataclass
class _Result:
    op: str
    case: NamedCase
    dtype: str
    target: Target  # a backend, of the CPU with an instruction set
    draw: int  # the number of the draw of random values, from 0
    verdict: Verdict

    @property
    def name(self) -> str:
        draw = f" draw {self.draw}" if self.draw else ""
        return f"{self.case.name} {self.dtype} {self.target}{draw}"


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 if all checks passed, else 1."""
    dtypes = spelling.dtypes(args.dtype, _DTYPES) or list(_DTYPES)
    operators = spelling.operators(args.op, PROOFS) or list(PROOFS)
    chosen = _targets(args.backend, args.isa)
    checks = [
        (op, case, dtype, target)
        for op in operators
        for case in _cases(op, args)
        for dtype in dtypes
        if _DTYPES[dtype] in case.dtypes
        for target in chosen
        if target.has_own_kernel(op, _DTYPES[dtype])
    ]
    if args.draws < 1:
        raise ValueError(f"--draws: must be at least 1, got {args.draws}")
    if not checks:
        raise ValueError("--op, --dtype and --case select no case")
    print(f"{len(checks)} checks on {', '.join(map(str, chosen))}")

    results = []
    for result in _with_progress(results_of(checks, args.draws), len(checks) * args.draws):
        results.append(result)
        for fault in result.verdict.faults:
            print(f"FAIL {result.name}: {fault}")
    print(_table(results))
    failed = [result for result in results if not result.verdict.ok]
    if not failed:
        print(f"all {len(results)} checks passed")
        return 0
    worst = max(failed, key=lambda result: result.verdict.ratio)
    isa = f" --isa {worst.target.isa}" if worst.target.isa else ""
    print(f"{len(failed)} of {len(results)} checks failed. To run only the worst:")
    print(f"  python -m fastattn verify --op {worst.op} --backend {worst.target.backend}{isa}"
          f" --dtype {worst.dtype} --case {worst.case.name}\n  {worst.case!r}")  # fmt: skip
    return 1


def _targets(backend: str | None, isa: str) -> list[Target]:
    """The targets that the arguments select. Raises ValueError if they select none."""
    native = [*_gpu_targets(), *targets(emulated=True)]
    if not native and backend is None:
        print("No native backend is built (see `fastattn info`): verifying the reference.")
        backend = "reference"
    available = [*native, Target("reference")]
    chosen = [target for target in available if target.backend == backend] if backend else native
    if not chosen:
        names = ", ".join(dict.fromkeys(target.backend for target in available))
        raise ValueError(f"--backend {backend}: allowed here are {names}")
    if isa == "current":
        return [target for target in chosen if target.is_current()]
    with_isa = [target for target in chosen if isa in ("all", target.isa)]
    if not with_isa:
        names = ", ".join(target.isa or "" for target in chosen)
        raise ValueError(f"--isa {isa}: allowed here are all, current, {names}")
    return with_isa


def _gpu_targets() -> list[Target]:
    """The backends that run on the GPU of this machine; none without a GPU."""
    if not evidence.processor("cuda").name:
        return []
    return [OnGpu(name) for name in dispatch.ON_GPU if not isinstance(dispatch.load(name), str)]


def _cases(op: str, args: argparse.Namespace) -> list[NamedCase]:
    cases = [case for case in PROOFS[op].cases if args.complete or args.case or not case.slow]
    if args.case:
        exact = [case for case in cases if case.name == args.case]
        cases = exact or [case for case in cases if args.case in case.name]
    return cases[::10] if args.quick else cases


_Check = tuple[str, NamedCase, str, Target]  # operator, case, dtype, target


def results_of(checks: Sequence[_Check], draws: int) -> Iterator[_Result]:
    """Yield the result of each check with each draw of values."""
    for draw, (op, case, dtype, target) in itertools.product(range(draws), checks):
        try:
            verdict = PROOFS[op](replace(case, draw=draw), _DTYPES[dtype], target)
        except Exception as error:  # one broken case must not hide the others
            is_memory = isinstance(error, torch.OutOfMemoryError)
            kind = "not checked, not enough memory" if is_memory else type(error).__name__
            verdict = Verdict(faults=[f"{kind}: {error}".split("\n")[0]])
        yield _Result(op, case, dtype, target, draw, verdict)


def _with_progress(results: Iterator[_Result], total: int) -> Iterator[_Result]:
    """Yield the results; on a terminal, show a progress line below them."""
    is_terminal = sys.stdout.isatty()
    start = time.perf_counter()
    for count, result in enumerate(results, 1):
        if is_terminal:
            print("\r\033[K", end="")  # erase the previous progress line
        yield result
        if is_terminal:
            seconds = (time.perf_counter() - start) / count * (total - count)
            print(f"{count}/{total}  {seconds:.0f} s left  {result.name}"[:100], end="", flush=True)
    if is_terminal:
        print("\r\033[K", end="")


def _table(results: list[_Result]) -> str:
    groups: dict[tuple[str, str, str], list[_Result]] = {}
    for result in results:
        groups.setdefault((result.op, str(result.target), result.dtype), []).append(result)
    rows = [["operator", "target", "dtype", "checks", "failed", "declined", "worst"]]
    for names, group in groups.items():
        failed = sum(not result.verdict.ok for result in group)
        declined = sum(bool(result.verdict.declined) for result in group)
        worst = max(group, key=lambda result: result.verdict.ratio)
        words = f"{worst.verdict.ratio:.2f} x the bound ({worst.case.name})"
        rows.append([*names, str(len(group)), str(failed), str(declined), words])
    return as_text(rows)
