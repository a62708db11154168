"""The measurement: each cell has rounds; in a round, every provider runs once, in random order."""

from __future__ import annotations

import dataclasses
import functools
import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import ops, results
from fastattn.bench.cells import TORCH_DTYPES, Cell, bytes_touched, flops, make_inputs
from fastattn.bench.machine import KIND_OF_DTYPE, describe_environment
from fastattn.bench.providers import DEFAULT, isa_of
from fastattn.bench.results import MIN_KEPT, CellResult, Outcome, Result, Round
from fastattn.bench.summary import is_from_memory
from fastattn.bench.worker import START_SECONDS, ProviderError, WorkerProcess, usable_cpus
from fastattn.testing.judge import deviations
from fastattn.testing.rounding import Noise

PEAK_SECONDS = 0.2
# A guard (a measurement of the peak beside a round) lasts as long as a provider takes in the round,
# within these limits: a processor's clock is higher for short loads.
GUARD_SECONDS = (0.02, 0.1)
# Rounds that a cell gets even if its share of the time is too short for them, until the time of the
# run is used up: few cells with enough rounds are better than many cells with too few.
ENOUGH = 9
SAMPLE_SECONDS = 0.02  # a sample repeats the call until it lasts at least this long


@dataclass(frozen=True)
class Settings:
    """The cells to measure, and for how long; the result file records all but the cells."""

    cells: Sequence[Cell]
    providers: Sequence[str] = DEFAULT
    baseline: str = "torch"
    threads: int = field(default_factory=torch.get_num_threads)
    seed: int = 0
    time_budget: float = 60.0  # seconds for the complete run
    rounds: int = 15  # the required number of comparable rounds per cell
    timeout: float = 60.0  # seconds without an answer after which a provider counts as hung

    def new_result(self) -> Result:
        """The result of a run with these settings, before anything is measured."""
        environment = describe_environment(self.cells[0].device) | {"threads": self.threads}
        plain = dataclasses.asdict(self)
        del plain["cells"]
        return Result(environment, plain, {}, ended="killed")


class Oracle:
    """The expected outputs of one cell, or of a sample of it, and the bound of docs/numerics.md."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.op = cell, ops.get(cell.op)
        self.inputs = make_inputs(cell, seed)
        self.parts = self.op.parts(cell, seed)
        self.compared = self.op.coverage(cell, self.parts)
        expected = functools.partial(self.op.expected, cell, self.inputs)
        self.reference = expected(self.parts)
        # Rounding affects all parts alike, and simulating it is slow.
        few = self.op.parts(cell, seed, few=True)
        of_few = self.reference if few == self.parts else expected(few)
        self.noise = Noise(functools.partial(expected, few), of_few, TORCH_DTYPES[cell.dtype])

    def check(self, outputs: dict[str, Tensor]) -> Outcome:
        """Compares all outputs; records the error with the largest ratio to its bound."""
        unjudged = self.op.unjudged(self.cell)
        judged = {name: x for name, x in outputs.items() if name not in unjudged}
        sampled = self.op.selected(self.cell, judged, self.parts)
        like = {name: name.removeprefix("grad_") for name in sampled}
        dtypes = {n: self.inputs.get(x, self.inputs.grad_out).dtype for n, x in like.items()}
        measured = deviations(sampled, self.reference, self.noise, dtypes=dtypes)
        worst = max(measured, key=lambda deviation: deviation.ratio)
        want = self.reference[worst.name]
        largest = float(want.abs().max()) if want.numel() else 1.0
        status, reason = ("ok", "") if worst.ok else ("WRONG", str(worst))
        return Outcome(status, reason, worst.error, worst.bound, largest, worst.name, self.compared)


class Runner:
    """One run. `run()` returns its measurements even after crashes, hangs and Ctrl-C.

    `earlier` is the result that this run continues; `report` is called after each cell, with the
    result so far.
    """

    def __init__(
        self,
        settings: Settings,
        earlier: Result | None = None,
        report: Callable[[Result, CellResult], None] = lambda result, cell: None,
    ) -> None:
        self.settings, self.report = settings, report
        self.result = settings.new_result()
        earlier, names = earlier or self.result, {cell.name for cell in settings.cells}
        self.cells = {c.cell.name: c for c in earlier.cells if c.cell.name in names}
        self.done = {n for n, c in self.cells.items() if self._is_done(c, earlier.cells)}
        self.result.peaks, self.result.providers = earlier.peaks, earlier.providers
        self.cpus = usable_cpus(settings.threads)
        self.workers: dict[str, WorkerProcess] = {}
        self.random = random.Random(settings.seed)

    def run(self) -> Result:
        torch.set_num_threads(self.settings.threads)
        self.deadline = time.monotonic() + self.settings.time_budget
        cells = self.settings.cells
        try:
            # All processes start at once; the process of "" measures the peaks.
            for name in ("", *self.settings.providers):
                self._start(name)
            for name in self.settings.providers:
                self._open(name)
            self._measure_peaks()
            for index, cell in enumerate(cells):
                if cell.name in self.done:
                    continue
                share = (self.deadline - time.monotonic()) / (len(cells) - index)
                if index > 0 and index == len(cells) // 2 and share > 0:
                    self._measure_peaks()  # at the start, halfway and at the end: peaks drift
                # A run measures at least one cell, however long the start took.
                self._measure(cell, share if index else max(share, 1.0))
            self._measure_peaks()
            self.result.ended = "complete"
        except KeyboardInterrupt:
            self.result.ended = "interrupted"
        finally:
            for worker in self.workers.values():
                worker.stop()
            self.result.cells = [*self.cells.values()]
        return self.result

    def _is_done(self, cell: CellResult, cells: list[CellResult]) -> bool:
        """Whether every provider has been measured, with enough rounds that can be used."""
        outcomes = [cell.outcomes.get(name) for name in self.settings.providers]
        statuses = ["SKIPPED" if outcome is None else outcome.status for outcome in outcomes]
        if "ok" in statuses and not _has_rounds(cell, min(MIN_KEPT, self.settings.rounds), cells):
            return False
        return "SKIPPED" not in statuses

    # Processes and peaks

    def _start(self, name: str) -> None:
        self.workers[name] = WorkerProcess(self.settings.threads, self.cpus, isa_of(name))

    def _open(self, name: str) -> None:
        """Makes a process load its provider; records its versions, or why it is unavailable."""
        threads = self.settings.threads
        try:
            about = self.workers[name].ask(START_SECONDS, "open", provider=name, threads=threads)
        except ProviderError as error:
            self.workers.pop(name).stop()
            # A provider that is not installed is not a failure of the run.
            status = "UNAVAILABLE" if error.status == "ERROR" else error.status
            self.result.providers[name] = {"status": status, "reason": error.reason}
        else:
            self.result.providers[name] = {"status": "ok", **about}

    def _measure_peaks(self) -> None:
        kinds = dict.fromkeys(KIND_OF_DTYPE[cell.dtype] for cell in self.settings.cells)
        for kind in (*kinds, "read_bandwidth"):
            rate, _ = self._peak(kind, PEAK_SECONDS)
            self.result.peaks[kind].samples.append(rate)

    def _peak(self, kind: str, seconds: float) -> tuple[float, float]:
        """The current peak, and the share of the cores that its measurement received."""
        threads, device = self.settings.threads, self.settings.cells[0].device
        request = {"kind": kind, "threads": threads, "seconds": seconds, "device": device}
        peak, share = self.workers[""].ask(START_SECONDS, "peak", **request)
        best = self.result.peaks.setdefault(kind, peak)
        best.rate = max(best.rate, peak.rate)
        return peak.rate, share

    # One cell

    def _measure(self, cell: Cell, seconds: float) -> None:
        """Measures a cell for about `seconds`; Ctrl-C keeps the cell if it has a round."""
        end = time.monotonic() + seconds
        measured = self.cells[cell.name] = CellResult(cell, 0, bytes_touched(cell))
        self.result.cells = [*self.cells.values()]
        try:
            for name in self.settings.providers:
                measured.outcomes[name] = Outcome()
                measured.outcomes[name] = self._initial_outcome(name, measured, seconds)
            self._check(measured)
            self._rounds(measured, end)
        except KeyboardInterrupt:
            if not measured.rounds:
                del self.cells[cell.name]
            raise
        self.report(self.result, measured)

    def _initial_outcome(self, name: str, measured: CellResult, seconds: float) -> Outcome:
        """An outcome that is ok if the provider can be measured, or says why not."""
        if seconds <= 0:
            return Outcome("SKIPPED", "the time budget was used up")
        if missing := ops.get(measured.cell.op).missing():
            return Outcome("UNAVAILABLE", missing)
        if name not in self.workers:
            provider = self.result.providers[name]
            return Outcome(provider["status"], provider["reason"])
        reasons = self._ask(name, measured, "why_not", cell=measured.cell)
        return Outcome("UNAVAILABLE", "; ".join(reasons)) if reasons else measured.outcomes[name]

    def _ask(self, name: str, measured: CellResult, do: str, **request: Any) -> Any:
        """The reply of a provider; None after a failure, which becomes its outcome."""
        try:
            return self.workers[name].ask(self.settings.timeout, do, **request)
        except ProviderError as error:
            measured.outcomes[name] = Outcome(error.status, error.reason)
            if error.status != "ERROR":  # it crashed, and gets a new process
                self._start(name)
                self._open(name)
            return None

    def _check(self, measured: CellResult) -> None:
        """Prepares the providers, and compares the first result of each with fp64."""
        ready, seed = measured.ready(), self.settings.seed
        if not ready:
            return
        try:
            measured.flops = flops(measured.cell, seed)
            oracle = Oracle(measured.cell, seed)
        except (RuntimeError, MemoryError) as error:  # such as too little memory
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            reason = f"the fp64 reference cannot be computed: {first_line}"
            measured.outcomes |= {name: Outcome("ERROR", reason) for name in ready}
            return
        request = {"seed": seed, "sample": SAMPLE_SECONDS}
        for name in ready:
            reply = self._ask(name, measured, "prepare", cell=measured.cell, **request)
            if reply is not None:
                outcome = oracle.check(torch.load(io.BytesIO(reply["outputs"])))
                outcome.peak_bytes, outcome.inner = reply["peak_bytes"], reply["inner"]
                measured.outcomes[name] = outcome

    def _rounds(self, measured: CellResult, end: float) -> None:
        if not measured.ready():
            return
        kind, (seconds, longest) = KIND_OF_DTYPE[measured.cell.dtype], GUARD_SECONDS
        before, enough = self._peak(kind, seconds), min(ENOUGH, self.settings.rounds)
        # Further rounds replace disturbed ones while there is time.
        for number in range(4 * self.settings.rounds):
            ready, now = measured.ready(), time.monotonic()
            least = enough if now < self.deadline else MIN_KEPT
            if not ready or (number >= least and now > end):
                return
            turn = Round((0.0, 0.0), {})
            for name in self.random.sample(ready, len(ready)):
                for what, x in (self._ask(name, measured, "time") or {}).items():
                    getattr(turn, what)[name] = x
            lasted = (time.monotonic() - now) / len(ready)
            seconds = max(GUARD_SECONDS[0], min(lasted, longest))
            after = self._peak(kind, seconds)
            turn.guard, turn.share = (before[0], after[0]), min(before[1], after[1])
            if is_from_memory(self.result, measured):
                turn.read, _ = self._peak("read_bandwidth", seconds)
            measured.rounds.append(turn)
            before = after
            if _has_rounds(measured, self.settings.rounds, self.result.cells):
                return


def _has_rounds(measured: CellResult, count: int, cells: list[CellResult]) -> bool:
    """Whether `count` rounds of a cell of this run are comparable, and the cell is not busy."""
    usual = results.usual_states(cells)
    comparable = results.comparable_rounds(measured.rounds, measured.ready(), usual)
    quiet = results.quiet_rounds(measured.rounds)
    return len(comparable) >= count and len(quiet) >= min(count, MIN_KEPT)
