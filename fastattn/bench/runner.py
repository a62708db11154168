"""The measurement: each cell has rounds; in a round, every provider runs once, in random order."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fastattn.bench import ops
from fastattn.bench.cells import Cell, bytes_touched, flops
from fastattn.bench.display import Progress
from fastattn.bench.environment import describe_environment
from fastattn.bench.inputs import true_in_mask
from fastattn.bench.oracle import Oracle
from fastattn.bench.peaks import KIND_OF_DTYPE
from fastattn.bench.providers import DEFAULT, isa_of
from fastattn.bench.results import CellResult, Journal, Outcome, Peak, Result, Round
from fastattn.bench.rounds import (
    MIN_KEPT,
    QUIET,
    QUIET_SHARE,
    comparable_rounds,
    quiet_rounds,
    usual_states,
)
from fastattn.bench.summary import is_from_memory
from fastattn.bench.workers import START_SECONDS, ProviderError, WorkerProcess, usable_cpus

PEAK_SECONDS = 0.2
# A guard (a measurement of the peak beside a round) lasts as long as a provider's sample, within
# these limits: a processor's clock is higher for short loads.
GUARD_SECONDS = (0.02, 0.1)
GUARD_TRIES = 3  # of the shortest guard; longer ones get as many tries as fit into that time
# Rounds that a cell gets even if its share of the time is too short for them, until the time of the
# run is used up: few cells with enough rounds say more than many with too few.
ENOUGH = 9
MAX_FAILURES = 3  # crashes and hangs after which a provider is no longer used


@dataclass(frozen=True)
class Settings:
    """What is measured and for how long; the result file records all but the cells."""

    cells: Sequence[Cell]
    providers: Sequence[str] = DEFAULT
    baseline: str = "torch"
    threads: int = field(default_factory=torch.get_num_threads)
    cache: str = "warm"  # or "cold": the caches are flushed before every call
    seed: int = 0
    time_budget: float = 60.0  # seconds for the complete run
    rounds: int = 15  # the required number of comparable rounds per cell
    sample_ms: float = 20.0  # a sample repeats the call until it lasts at least this long
    timeout: float = 60.0  # seconds without an answer after which a provider counts as hung

    def to_json(self) -> dict[str, object]:
        plain = dataclasses.asdict(self)
        del plain["cells"]
        return plain


class Runner:
    """One run. `run()` returns its measurements even after crashes, hangs and Ctrl-C."""

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        earlier: Callable[[Result], Result | None] = lambda result: None,
    ) -> None:
        """`earlier` returns the result of the run that this one continues, if any."""
        self.settings = settings
        self.progress = progress
        self.journal = Journal(None)
        self.cpus = usable_cpus(settings.threads)
        self.workers: dict[str, WorkerProcess] = {}
        self.failures: dict[str, int] = dict.fromkeys(settings.providers, 0)
        self.random = random.Random(settings.seed)
        self.oracle: Oracle | None = None
        self.sample_seconds: dict[str, float] = {}  # the last sample of each provider
        pinned = f"{len(self.cpus)} processors" if self.cpus else "nothing"
        device = settings.cells[0].device if settings.cells else "cpu"
        environment = describe_environment(device) | {
            "threads": settings.threads,
            "pinned_to": pinned,
        }
        self.result = Result(environment, settings.to_json(), {})
        before = earlier(self.result)
        self.earlier: dict[str, CellResult] = {}
        self.done: set[str] = set()
        if before is not None:
            names = {cell.name for cell in settings.cells}
            self.earlier = {c.cell.name: c for c in before.cells if c.cell.name in names}
            self.done = {n for n, c in self.earlier.items() if self._is_done(c, before.cells)}
            self.result.peaks, self.result.providers = before.peaks, before.providers

    def run(self, journal: Journal) -> Result:
        """Runs all cells; writes each one to the journal as soon as it is measured."""
        self.journal = journal
        self.deadline = time.monotonic() + self.settings.time_budget
        torch.set_num_threads(self.settings.threads)
        try:
            self._start()
            for index, cell in enumerate(self.settings.cells):
                if cell.name in self.done:
                    self.result.cells.append(self.earlier[cell.name])
                    self.progress.measured(self.result)
                    continue
                found = CellResult(cell, 0, bytes_touched(cell))
                self.result.cells.append(found)
                share = (self.deadline - time.monotonic()) / (len(self.settings.cells) - index)
                if 0 < index == len(self.settings.cells) // 2 and share > 0:
                    self._measure_peaks()
                try:
                    # A run measures at least one cell, however long the start took.
                    self._measure(found, share if index else max(share, 1.0))
                except KeyboardInterrupt:
                    _skip_untimed(found)
                    raise
                finally:
                    self.journal.write("cell", found.to_json())
                self.progress.measured(self.result)
            self._measure_peaks()
        except KeyboardInterrupt:
            self.result.ended = "interrupted"
            reached = {found.cell.name for found in self.result.cells}
            self.result.cells += [c for name, c in self.earlier.items() if name not in reached]
        finally:
            for worker in self.workers.values():
                worker.stop()
            self.journal.write("end", self.result.end())
        return self.result

    def _is_done(self, cell: CellResult, cells: list[CellResult]) -> bool:
        """Whether every provider has been measured, with enough rounds that can be used."""
        outcomes = [cell.outcomes.get(name) for name in self.settings.providers]
        statuses = ["SKIPPED" if outcome is None else outcome.status for outcome in outcomes]
        if "ok" in statuses and not _has_rounds(cell, min(MIN_KEPT, self.settings.rounds), cells):
            return False
        return "SKIPPED" not in statuses

    # Starting

    def _start(self) -> None:
        # All processes start at once; that of "" measures the peaks.
        self.workers = {name: self._new_worker(name) for name in ("", *self.settings.providers)}
        for name in self.settings.providers:
            self._open(name)
        self.journal.write("header", self.result.header())
        for found in self.earlier.values():
            self.journal.write("cell", found.to_json())
        self.progress.start(self.result, self.settings.cells)
        self._measure_peaks()

    def _new_worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(self.settings.threads, self.cpus, isa_of(name))

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
        for kind in (*kinds, "read_bandwidth", "copy_bandwidth"):
            rate, _ = self._peak(kind, PEAK_SECONDS)
            self.result.peaks[kind].samples.append(rate)

    def _guard(self, kind: str, seconds: float, before: float = 0.0) -> tuple[float, float]:
        """The current peak, and the share of the cores that its measurement received.

        Repeats a measurement that was disturbed or is far below `before`, and returns the best.
        """
        best = (0.0, 0.0)
        for _ in range(max(1, round(GUARD_TRIES * GUARD_SECONDS[0] / seconds))):
            rate, share = best = max(best, self._peak(kind, seconds))
            if rate >= QUIET * before and share >= QUIET_SHARE:
                break
        return best

    def _peak(self, kind: str, seconds: float) -> tuple[float, float]:
        """Measures a peak and keeps the best of the run."""
        found = self.workers[""].ask(
            START_SECONDS,
            "peak",
            kind=kind,
            threads=self.settings.threads,
            seconds=seconds,
            device=self.settings.cells[0].device,
        )
        new = Peak(found.rate, found.method, unit=found.unit)
        best = self.result.peaks.setdefault(kind, new)
        best.rate = max(best.rate, found.rate)
        return found.rate, found.share

    # One cell

    def _measure(self, found: CellResult, seconds: float) -> None:
        cell, end = found.cell, time.monotonic() + seconds
        for name in self.settings.providers:
            found.outcomes[name] = self._availability(name, cell, seconds)
        ready = [name for name, outcome in found.outcomes.items() if outcome.status == "ok"]
        if not ready:
            return
        try:
            found.flops = flops(cell, true_in_mask(cell, self.settings.seed))
            oracle = self._oracle_for(cell)
        except (RuntimeError, MemoryError) as error:  # such as too little memory
            reason = f"the fp64 reference cannot be computed: {_first_line(error)}"
            found.outcomes |= {name: Outcome("ERROR", reason) for name in ready}
            return
        for name in ready:
            self._guarded(name, found, partial(self._prepare, name, found, oracle))
        self._rounds(found, end)

    def _availability(self, name: str, cell: Cell, seconds: float) -> Outcome:
        if seconds <= 0:
            return Outcome("SKIPPED", "the time budget was used up")
        if missing := ops.missing(cell.op):
            return Outcome("UNAVAILABLE", missing)
        if name not in self.workers:
            provider = self.result.providers[name]
            return Outcome(provider["status"], provider["reason"])
        try:
            reasons = self.workers[name].ask(self.settings.timeout, "why_not", cell=cell)
        except ProviderError as error:
            self._restart(name, error)
            return Outcome(error.status, error.reason)
        return Outcome("UNAVAILABLE", "; ".join(reasons)) if reasons else Outcome()

    def _oracle_for(self, cell: Cell) -> Oracle:
        """The expected outputs; those of fwd+bwd are used for all passes of a shape in a row."""
        by_shape = itertools.groupby(self.settings.cells, lambda c: _with_pass(c, "fwd"))
        same = next(passes for _, cells in by_shape if cell in (passes := list(cells)))
        both = any(c.passes != "fwd" for c in same)
        wanted = _with_pass(cell, "fwd+bwd" if both else "fwd")
        if self.oracle is None or self.oracle.cell != wanted:
            self.oracle = Oracle(wanted, self.settings.seed)
        return self.oracle

    def _prepare(self, name: str, found: CellResult, oracle: Oracle) -> None:
        """Prepares a provider and checks its first result; a wrong one is not timed."""
        outcome = found.outcomes[name]
        reply = self.workers[name].ask(
            self.settings.timeout,
            "prepare",
            cell=found.cell,
            seed=self.settings.seed,
            sample=self.settings.sample_ms / 1e3,
            cold=self.settings.cache == "cold",
        )
        check = oracle.check(torch.load(io.BytesIO(reply["outputs"])))
        outcome.peak_bytes, outcome.inner = reply["peak_bytes"], reply["inner"]
        self.sample_seconds[name] = reply["seconds"]
        outcome.max_error, outcome.bound = check.max_error, check.bound
        outcome.largest = check.largest
        outcome.worst_tensor, outcome.compared = check.tensor, check.compared
        if not check.ok:
            outcome.status, outcome.reason = "WRONG", check.reason

    def _rounds(self, found: CellResult, end: float) -> None:
        kind = KIND_OF_DTYPE[found.cell.dtype]
        seconds = self._guard_seconds(found)
        before = self._guard(kind, seconds)
        enough = min(ENOUGH, self.settings.rounds)
        # Further rounds replace disturbed ones while there is time.
        for number in range(4 * self.settings.rounds):
            ready = [name for name, outcome in found.outcomes.items() if outcome.status == "ok"]
            now = time.monotonic()
            least = enough if now < self.deadline else MIN_KEPT
            if not ready or (number >= least and now > end):
                return
            turn = Round((0.0, 0.0), {})
            for name in self.random.sample(ready, len(ready)):
                self._guarded(name, found, partial(self._time, name, found.outcomes[name], turn))
            turn.guard_seconds = seconds = self._guard_seconds(found)
            after = self._guard(kind, seconds, before[0])
            turn.guard = (before[0], after[0])
            turn.share = min(before[1], after[1])
            if is_from_memory(self.result, found):
                turn.read, _ = self._peak("read_bandwidth", seconds)
            found.rounds.append(turn)
            before = after
            if _has_rounds(found, self.settings.rounds, self.result.cells):
                return

    def _guard_seconds(self, found: CellResult) -> float:
        """The mean duration of the last samples of this cell, within GUARD_SECONDS."""
        ready = [name for name, outcome in found.outcomes.items() if outcome.status == "ok"]
        lasted = sum(self.sample_seconds[name] for name in ready) / max(len(ready), 1)
        least, most = GUARD_SECONDS
        return max(least, min(most, lasted))

    def _time(self, name: str, outcome: Outcome, turn: Round) -> None:
        reply = self.workers[name].ask(self.settings.timeout, "time")
        turn.ms[name], turn.pushed[name] = reply["ms"], reply["pushed"]
        if reply["probes"]:
            turn.probes[name] = reply["probes"]
        self.sample_seconds[name] = (outcome.inner or 1) * reply["ms"] / 1e3
        if reply["attention"] is not None:
            turn.attention[name] = reply["attention"]

    # Failures

    def _guarded(self, name: str, found: CellResult, action: Callable[[], None]) -> None:
        """Runs `action`; an error of the provider is recorded in its outcome."""
        try:
            action()
        except ProviderError as error:
            outcome = found.outcomes[name]
            outcome.status, outcome.reason = error.status, error.reason
            self._restart(name, error)

    def _restart(self, name: str, error: ProviderError) -> None:
        """Starts a new process after a crash or hang, unless there were too many."""
        if error.status == "ERROR":
            return
        self.failures[name] += 1
        if self.failures[name] < MAX_FAILURES:
            self.workers[name] = self._new_worker(name)
            self._open(name)
        else:
            del self.workers[name]
            reason = f"disabled after {MAX_FAILURES} failures, the last: {error.reason}"
            self.result.providers[name] |= {"status": error.status, "reason": reason}


def _has_rounds(found: CellResult, count: int, cells: list[CellResult]) -> bool:
    """Whether `count` rounds of a cell of this run are comparable, and its times not busy."""
    names = [name for name, outcome in found.outcomes.items() if outcome.status == "ok"]
    comparable = comparable_rounds(found.rounds, names, usual_states(cells))
    quiet = quiet_rounds(found.rounds)
    return len(comparable) >= count and len(quiet) >= min(count, MIN_KEPT)


def _skip_untimed(found: CellResult) -> None:
    """Marks the providers without a sample in an interrupted cell as SKIPPED."""
    for name, outcome in found.outcomes.items():
        if outcome.status == "ok" and not any(name in turn.ms for turn in found.rounds):
            outcome.status, outcome.reason = "SKIPPED", "the run was interrupted"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _with_pass(cell: Cell, passes: str) -> Cell:
    return dataclasses.replace(cell, passes=passes, preset="", label="")
